from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradaccum.engine.batching import BatchPlan
from gradaccum.measurements import limits
from gradaccum.measurements.bench import Bench
from gradaccum.measurements.costs import Limit
from gradaccum.measurements.limits import flops_of_micro_batch
from gradaccum.measurements.setup import Setup

WIDTHS = [(64, 128), (128, 128), (128, 10)]


@pytest.mark.parametrize("samples", [1, 5, 12])
def test_a_micro_batch_s_operations_are_those_of_its_matrix_products(setup: Setup, samples: int) -> None:
    bench = Bench.prepare(setup)
    forward = sum(2 * samples * wide * narrow for wide, narrow in WIDTHS)
    first_layer_needs_no_input_gradient = 2 * samples * 64 * 128
    counted = flops_of_micro_batch(bench, bench.micro_batch(range(samples)))
    assert counted == 3 * forward - first_layer_needs_no_input_gradient


def test_a_transformer_s_operations_include_those_of_attention(make_setup: Callable[..., Setup]) -> None:
    bench = Bench.prepare(make_setup("dictionary"))
    tokens, width, layers = 64, 64, 2
    dense = layers * 12 * width**2 + 256 * width
    attention = layers * 2 * tokens * width
    least = 6 * tokens * (dense + attention / 2)  # half of it is masked
    counted = flops_of_micro_batch(bench, bench.micro_batch([0]))
    assert least <= counted <= 1.2 * 6 * tokens * (dense + attention)


def test_counting_leaves_the_bench_s_models_as_they_are(setup: Setup) -> None:
    bench = Bench.prepare(setup)
    before = bench.model().state_dict()
    flops_of_micro_batch(bench, bench.micro_batch(range(3)))
    assert all(torch.equal(value, before[name]) for name, value in bench.model().state_dict().items())


def test_utilization_is_work_over_time_over_peak() -> None:
    limit = Limit(peak_flops_per_sec=1e9, flops={4: 1_000_000})
    assert limit.share(BatchPlan(12, 4), step_ms=30.0) == pytest.approx(0.1)


def test_the_machine_s_peak_is_that_of_its_fastest_product(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [3.0, 0.5, *[2.0] * (limits.TRIES - 2)]
    ticks = (at for took in seconds for at in (0.0, took))
    monkeypatch.setattr(limits, "MATRIX", {"cpu": 4})
    monkeypatch.setattr(limits, "perf_counter", lambda: next(ticks))
    assert limits.matmul_peak_flops_per_sec(torch.device("cpu")) == 2 * 4**3 / 0.5
    assert list(ticks) == []

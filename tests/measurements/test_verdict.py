"""When two ways to step count as the same, and what is compared for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradaccum import Accumulator, Objective, Workload
from gradaccum.measurements.bench import Bench
from gradaccum.measurements.comparison import full_batch_step, scale_of, take_step
from gradaccum.measurements.setup import Setup
from gradaccum.measurements.verdict import FLOAT32_ROUNDING, Difference, float32_bound, judge
from tests.own_workload import regression


def differs(**changes: Any) -> Difference:
    none = dict.fromkeys(Difference.__dataclass_fields__, 0.0)
    return Difference(**{**none, "worst_parameter": "w", "norm_ratio": 1.0, "steps_differ": False, **changes})


@pytest.mark.parametrize("kind", ["grad_rel_diff", "loss_rel_diff", "state_rel_diff"])
def test_float64_is_judged_sharply(kind: str) -> None:
    right = judge(differs(**{kind: 9e-13}), differs(), micro_batches=4, tolerance=1e-4)
    wrong = judge(differs(**{kind: 1.1e-12}), differs(), micro_batches=4, tolerance=1e-4)
    assert right.equivalent
    assert not wrong.equivalent


def test_what_is_not_a_number_is_never_equivalent() -> None:
    assert not judge(differs(grad_rel_diff=float("nan")), differs(), micro_batches=2, tolerance=1e-4).equivalent


@pytest.mark.parametrize("kind", ["max_grad_diff", "max_param_diff"])
def test_a_float32_excess_is_a_kink_only_where_float64_agrees(kind: str) -> None:
    excess = differs(**{kind: 2e-4})
    kink = judge(differs(), excess, micro_batches=4, tolerance=1e-4)
    assert kink.equivalent
    assert kink.kink
    wrong = judge(differs(grad_rel_diff=1e-5), excess, micro_batches=4, tolerance=1e-4)
    assert not wrong.equivalent
    assert not wrong.kink


def test_a_large_float32_difference_is_no_kink() -> None:
    verdict = judge(differs(), differs(grad_rel_diff=0.3), micro_batches=4, tolerance=1e-4)
    assert not verdict.equivalent
    assert not verdict.kink


def test_the_float32_bound_has_a_floor_and_grows_slowly() -> None:
    assert float32_bound(1) == FLOAT32_ROUNDING * 34
    assert float32_bound(64) == FLOAT32_ROUNDING * 48


def test_the_scale_is_that_of_the_summed_magnitudes(setup: Setup) -> None:
    workload = Workload(
        name="opposed",  # two samples whose gradients cancel
        make_model=lambda: nn.Linear(1, 1, bias=False),
        objective=Objective(lambda model, batch: (model(torch.ones_like(batch)) * batch).sum(), len),
        train=torch.tensor([[3.0], [-3.0]]),
        validation=torch.tensor([[3.0]]),
        collate=torch.stack,
    )
    bench = Bench(workload, torch.device("cpu"), seed=0)
    settings = setup.optimizers.sgd
    window = bench.window([0, 1], [1, 1], torch.float64)
    scale = scale_of(bench, window, settings=settings, dtype=torch.float64)
    trace = take_step(
        bench,
        full_batch_step(workload.objective),
        bench.window([0, 1], [2], torch.float64),
        settings=settings,
        dtype=torch.float64,
    )
    assert trace.grad_norm == 0
    assert scale.gradient == pytest.approx(3.0)


def test_a_trace_holds_what_the_optimizer_found_and_left(setup: Setup) -> None:
    bench = Bench(regression(), torch.device("cpu"), seed=0)

    def step(model: nn.Module, optimizer: Optimizer, window: Sequence[Any]) -> Tensor:
        result = Accumulator(model, optimizer, bench.workload.objective).step(window)
        for parameter in model.parameters():
            parameter.grad = None
        return result.loss

    window = bench.window(range(6), [4, 2], torch.float64)
    before = dict(bench.model(torch.float64).named_parameters())
    trace = take_step(bench, step, window, settings=setup.optimizers.sgd, dtype=torch.float64)
    for name, parameter in trace.parameters.items():
        torch.testing.assert_close(parameter, before[name].detach() - 0.1 * trace.gradients[name])
    assert set(trace.state) == {"momentum_buffer"}
    assert trace.optimizer_steps == 1

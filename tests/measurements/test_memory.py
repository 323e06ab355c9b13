from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from gradaccum.config import read_params, section
from gradaccum.errors import ConfigError
from gradaccum.measurements import windows_checked
from gradaccum.measurements.bench import Bench
from gradaccum.measurements.memory import Config, measure
from gradaccum.measurements.memory_results import TELLING_BYTES, Checked, failures, outcome
from gradaccum.measurements.processes import own_processes
from gradaccum.measurements.setup import SGD, Setup
from gradaccum.measurements.tally import KINDS, Peak
from gradaccum.measurements.window_memory import Seen, Window, predict
from gradaccum.measurements.windows_checked import largest_in_budget, run

SECTION = {
    "micro_batch": [1, 16],
    "accum_steps": [1, 2, 5],
    "optimizer": "adamw",
    "precision": "float32",
    "budget_bytes": 2**20,
    "budget_device": "cuda",
}


def config(**changes: Any) -> Config:
    return section({"memory": {**SECTION, **changes}}, "memory", Config)


def die(*_: object) -> Seen:
    """What the system does to a process that takes too much memory."""
    signal.raise_signal(signal.SIGKILL)
    raise AssertionError


def checked(predicted: int, tally: int, *, steps: int = 2, process: int | None = None) -> Checked:
    nothing = dict.fromkeys(KINDS, 0)
    return Checked(
        Window(4, steps, SGD(lr=0.1)),
        Peak(nothing | {"activations": predicted}),
        Seen(Peak(nothing | {"activations": tally}), process, None),
    )


def test_every_window_is_predicted_run_and_compared(setup: Setup) -> None:
    result = measure(config(), setup)
    points = result.curve.points
    assert [(point["micro_batch"], point["accum_steps"]) for point in points] == [
        (micro, steps) for micro in (1, 16) for steps in (1, 2, 5)
    ]
    for point in points:
        assert point["predicted_bytes"] == point["tally_bytes"] == sum(point[f"{kind}_bytes"] for kind in KINDS)
    assert result.metrics["max_prediction_error"] == 0
    assert result.metrics["max_growth_in_accum_steps"] == pytest.approx(0, abs=1e-3)
    assert not result.failures
    assert "within 0.00% of the same tally" in result.findings[0]


def test_the_largest_micro_batch_fits_the_budget_with_headroom_and_the_next_does_not(setup: Setup) -> None:
    bench = Bench.prepare(setup)
    largest = largest_in_budget(bench, config(), setup)
    assert largest is not None
    fits, next_one = (
        predict(bench, Window(micro, 2, setup.optimizers.adamw), device="cuda").total
        for micro in (largest, 2 * largest)
    )
    assert fits <= 0.9 * 2**20 < next_one
    assert largest_in_budget(bench, config(budget_bytes=2**16), setup) is None


def test_a_prediction_that_misses_the_tally_fails_the_claim() -> None:
    assert not list(failures([checked(10_000, 10_000)]))
    (failure,) = failures([checked(10_100, 10_000)])
    assert failure.startswith("micro_batch=4, accum_steps=2: predicted 10100 bytes, but the real window's tensors took")


def test_memory_that_grows_with_accumulation_steps_fails_the_claim() -> None:
    grown = [checked(1000, 1000, steps=2), checked(1200, 1200, steps=8)]
    (failure,) = failures(grown)
    assert failure.startswith("micro_batch=4: memory grows by 20.0% with accum_steps")
    assert not list(failures([checked(500, 500, steps=1), checked(1000, 1000, steps=2)]))
    assert not list(failures([checked(1000, 1000, steps=2), checked(1072, 1072, steps=8)]))  # the losses are kept


@pytest.mark.parametrize(
    ("process", "said"),
    [
        (210, "predicted; of the 1 predicted above 160 MiB, which alone can tell, all within 10 % of it and 16 MiB"),
        (240, "of the 1 predicted above 160 MiB, which alone can tell, 1 by over 10 % and 16 MiB (4 x 2)"),
        (160, "took -40 MiB to"),
    ],
)
def test_what_is_seen_from_outside_is_compared_with_the_prediction(process: int, said: str) -> None:
    small = checked(2**20, 2**20, process=2**20)
    result = outcome([small, checked(200 * 2**20, 200 * 2**20, process=process * 2**20)], config(), 8)
    assert any(said in finding for finding in result.findings)
    assert result.metrics["outside_agrees"] == ("within" in said)
    assert result.metrics["outside_windows_judged"] == 1


def test_windows_too_small_for_the_outside_to_tell_judge_nothing() -> None:
    result = outcome([checked(1, 100, process=2**20), checked(2**20, 2**20, process=9 * 2**20)], config(), 8)
    assert result.metrics["outside_agrees"] is None
    assert result.metrics["outside_windows_judged"] == 0
    assert any("that judges none of them" in finding for finding in result.findings)


def test_the_default_windows_include_some_that_the_outside_can_judge(setup: Setup) -> None:
    bench, largest = Bench.prepare(setup), max(read_params()["memory"]["micro_batch"])
    assert predict(bench, Window(largest, 1, setup.optimizers.adamw)).total > TELLING_BYTES


def test_where_the_system_does_not_tell_nothing_is_claimed() -> None:
    result = outcome([checked(100, 100)], config(), None)
    assert result.metrics["outside_agrees"] is None
    assert not any("outside" in finding for finding in result.findings)
    assert "Not even a micro-batch of 1 fits 1 MiB of cuda memory, less 10% headroom" in result.findings[-1]


def test_a_window_whose_process_is_killed_is_named(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows_checked, "observe", die)
    window = Window(16, 2, setup.optimizers.sgd)
    with own_processes() as processes, pytest.raises(ConfigError, match=r"micro_batch=16, accum_steps=2 was killed"):
        run(processes, setup, window)


def test_a_window_that_gets_no_memory_is_named_and_other_errors_are_left_alone(setup: Setup) -> None:
    window = Window(16, 2, setup.optimizers.sgd)
    with ThreadPoolExecutor() as here, pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows_checked, "observe", lambda *_: torch.empty(2**60))
        with pytest.raises(ConfigError, match=r"micro_batch=16, accum_steps=2 was killed, or was given no more memory"):
            run(here, setup, window)
        patch.setattr(windows_checked, "observe", lambda *_: torch.ones(2) @ torch.ones(3))
        with pytest.raises(RuntimeError, match="size"):
            run(here, setup, window)


def test_a_window_that_is_predicted_not_to_fit_here_is_refused_before_any_runs(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows_checked, "observe", die)
    with pytest.raises(ConfigError, match=r"micro_batch=16777216, accum_steps=5 would take .* are free here"):
        measure(config(micro_batch=[1, 2**24], accum_steps=[5]), setup)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": "int8"}, r"memory.precision = 'int8' is not allowed"),
        ({"micro_batch": [4, 4]}, "holds 4 more than once"),
        ({"micro_batch": [2**24 + 1]}, r"memory.micro_batch.0 = 16777217 .* less than or equal to 16777216"),
        ({"accum_steps": [10**12]}, r"memory.accum_steps.0 = 1000000000000 .* less than or equal to 1024"),
        ({"budget_bytes": 8}, r"memory.budget_bytes: 8 B is no memory .* Did you mean 8589934592 \(8 GiB\)\?"),
        ({"budget_bytes": 10**19}, "memory.budget_bytes: .* is no memory in which"),
        ({"budget_bytes": 10**400}, "memory.budget_bytes = .* is not allowed"),
        ({"budget_bytes": "8GiB"}, r"memory.budget_bytes = '8GiB' is not allowed"),
        ({"budget_device": "tpu"}, "'cpu' or 'cuda'"),
    ],
)
def test_a_value_that_cannot_be_right_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(**changes)

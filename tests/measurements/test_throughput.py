from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradaccum.config import section, shared
from gradaccum.engine.accumulator import Accumulator
from gradaccum.engine.batching import Batch
from gradaccum.errors import ConfigError
from gradaccum.measurements import points, sweep, timing
from gradaccum.measurements.setup import Setup
from gradaccum.measurements.throughput import Config, measure
from gradaccum.results.outcome import Outcome
from gradaccum.workloads.choice import WorkloadChoice
from tests.measurements.series import logged_and_read_back

SECTION = {
    "micro_batch": 3,
    "accum_steps": [1, 2, 5],
    "num_steps": 4,
    "frontier": {"effective_batch": 12, "micro_batch": [1, 3, 12], "num_steps": 2},
    "repeats": 2,
    "seconds": 60.0,
    "optimizer": "sgd",
}


def config(**changes: Any) -> Config:
    return section({"throughput": {**SECTION, **changes}}, "throughput", Config)


@pytest.fixture(scope="module", autouse=True)
def a_clock_that_keeps_still() -> Iterator[None]:
    """Steps take 0.2 ms a micro-batch and 0.5 ms once, so that no assertion depends on the machine."""

    def timed(timer: timing.Timer, accumulator: Accumulator, window: Sequence[Batch]) -> timing.TimedStep:
        del timer
        return timing.TimedStep(accumulator.step(window), 0.2 * len(window) + 0.5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing.Timer, "timed", timed)
        patch.setattr(timing, "thread_time", timing.perf_counter)
        patch.setattr(sweep, "matmul_peak_flops_per_sec", lambda device: 1e11)
        yield


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    setup = shared(
        {
            "seed": 7,
            "device": "cpu",
            "threads": 1,
            "workload": {"name": "digits"},
            "optimizers": {"sgd": {"lr": 0.1}, "adamw": {"lr": 1e-3}},
        },
        Setup,
    )
    return measure(config(), setup)


def test_the_curve_holds_the_points_of_the_fixed_micro_batch_only(outcome: Outcome) -> None:
    assert [(point["effective_batch"], point["accum_steps"]) for point in outcome.curve.points] == [
        (3, 1),
        (6, 2),
        (15, 5),
    ]
    for point in outcome.curve.points:
        assert point["steps"] == point["sync_calls"] == 4 * 2
        assert point["step_ms_low"] <= point["median_step_ms"] <= point["step_ms_high"]
        assert point["samples_per_sec"] > 0
        assert 0 < point["mfu"] < 1
    assert not outcome.failures


def test_the_frontier_cuts_the_same_effective_batch_finer_and_finer(outcome: Outcome) -> None:
    rows = outcome.tables["frontier"]
    assert [(row["micro_batch"], row["accum_steps"]) for row in rows] == [(1, 12), (3, 4), (12, 1)]
    assert {row["effective_batch"] for row in rows} == {12}
    assert {(row["workload"], row["optimizer"]) for row in rows} == {("digits", "sgd")}
    assert all(row["steps"] == 2 * 2 for row in rows)


def test_every_optimizer_step_that_counts_has_its_record(outcome: Outcome) -> None:
    steps = outcome.tables["steps"]
    assert len(steps) == 3 * 8 + 3 * 4
    point = outcome.curve.points[-1]
    own = [row for row in steps if (row["micro_batch"], row["accum_steps"]) == (3, 5)]
    assert sum(row["loss"] for row in own) / len(own) == pytest.approx(point["avg_loss"])
    assert all(row["sync_calls"] == 1 for row in own)


def test_a_window_without_targets_has_a_time_but_no_loss_and_no_sync(make_setup: Callable[..., Setup]) -> None:
    found = measure(config(micro_batch=1), make_setup("tests.own_workload:masked"))
    assert not found.failures
    own = [row for row in found.tables["steps"] if row["effective_batch"] == 1]
    assert {row["loss"] is None for row in own} == {True, False}
    assert all(row["sync_calls"] == (row["loss"] is not None) for row in own)
    known = [row["loss"] for row in own if row["loss"] is not None]
    assert found.curve.points[0]["avg_loss"] == pytest.approx(sum(known) / len(known))


def test_the_headline_gives_every_fitted_number_with_its_interval(outcome: Outcome) -> None:
    metrics = outcome.metrics
    for name, value in (("t_micro_ms", 0.2), ("t_step_ms", 0.5), ("flattens_at_effective_batch", 3 * 48)):
        for key in (f"{name}_low", name, f"{name}_high"):
            assert metrics[key] == pytest.approx(value)
    assert metrics["matmul_peak_gflops"] == 100
    assert metrics["extrapolation_error"] == pytest.approx(0, abs=1e-9)
    assert metrics["disturbed_visits"] == 0
    assert metrics["frontier_fastest_micro_batch"] == 12
    assert metrics["frontier_slowest_over_fastest"] == pytest.approx(2.9 / 0.7)


def test_the_fitted_times_are_those_of_the_headline(outcome: Outcome) -> None:
    metrics = outcome.metrics
    assert metrics["peak_samples_per_sec"] == max(point["samples_per_sec"] for point in outcome.curve.points)
    for point in outcome.curve.points:
        assert point["fitted_step_ms"] == pytest.approx(
            point["accum_steps"] * metrics["t_micro_ms"] + metrics["t_step_ms"]
        )


def test_batches_are_made_before_the_clock_starts(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    events: list[str] = []
    micro_batch, timed = timing.Bench.micro_batch, timing.Timer.timed
    monkeypatch.setattr(timing.Bench, "micro_batch", lambda *args: events.append("batch") or micro_batch(*args))
    monkeypatch.setattr(timing.Timer, "timed", lambda *args: events.append("clock") or timed(*args))
    measure(config(), setup)
    assert "batch" not in events[events.index("clock") :]


def test_one_round_alone_claims_no_interval(setup: Setup) -> None:
    single = measure(config(repeats=1), setup)
    assert all(single.metrics[f"{name}_low"] is None for name in ("t_micro_ms", "flattens_at_effective_batch"))
    assert all(point["step_ms_low"] is None for point in single.curve.points)
    assert "interval" not in single.findings[0]


def test_points_stand_in_the_order_of_their_axis_whatever_the_params_say(setup: Setup) -> None:
    small = {"effective_batch": 12, "micro_batch": [12, 1], "num_steps": 1}
    result = measure(config(accum_steps=[5, 1, 2], num_steps=1, frontier=small), setup)
    assert [point["accum_steps"] for point in result.curve.points] == [1, 2, 5]
    assert [row["micro_batch"] for row in result.tables["frontier"]] == [1, 12]


@pytest.mark.parametrize("peaks", [[3e11, 1e11], [1e11, 3e11]])
def test_the_machine_s_limit_is_the_best_that_was_seen_before_and_after_the_timing(
    peaks: list[float], setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = iter(peaks)
    monkeypatch.setattr(sweep, "matmul_peak_flops_per_sec", lambda device: next(seen))
    assert measure(config(), setup).metrics["matmul_peak_gflops"] == 300


def test_times_to_rely_on_are_not_doubted(setup: Setup) -> None:
    assert len(measure(config(accum_steps=[1, 2, 3, 5]), setup).findings) == 4


def test_points_too_few_to_test_a_line_are_said(outcome: Outcome) -> None:
    assert outcome.findings[4] == (
        "3 points lie on or near any line: set throughput.accum_steps to at least 4 to see whether the model holds."
    )


def test_what_speaks_against_relying_on_the_times_is_said(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(timer: timing.Timer, accumulator: Accumulator, window: Sequence[Batch]) -> timing.TimedStep:
        del timer
        return timing.TimedStep(accumulator.step(window), 3.0 if len(window) == 2 else 0.2 * len(window) + 0.5)

    monkeypatch.setattr(timing.Timer, "timed", noisy)
    monkeypatch.setattr(points, "BUSY", 2.0)  # so that no visit had enough of a CPU
    monkeypatch.setattr(sweep, "matmul_peak_flops_per_sec", lambda device: 1.0)
    said = measure(config(accum_steps=[1, 2, 3, 5]), setup).findings[4:]
    assert [sentence.split()[0] for sentence in said] == ["The", "The", "Over"]
    assert "That is most of them: measure again on a quieter machine." in said[0]
    assert "more than the 5% by which flat is told" in said[1]


@pytest.mark.parametrize(
    ("bends", "doubted"), [({}, False), ({3: 1.04}, False), ({3: 1.12}, True), ({8: 1.04}, False), ({8: 1.08}, True)]
)
def test_a_fit_that_misses_points_by_more_than_flat_means_is_doubted(
    bends: dict[int, float], doubted: bool, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off the line at one point that is fitted, or only where the smaller half of the points leads."""

    def bent(timer: timing.Timer, accumulator: Accumulator, window: Sequence[Batch]) -> timing.TimedStep:
        del timer
        step = accumulator.step(window)
        return timing.TimedStep(step, (0.2 * len(window) + 0.5) * bends.get(len(window), 1.0))

    monkeypatch.setattr(timing.Timer, "timed", bent)
    small = {"effective_batch": 12, "micro_batch": [12], "num_steps": 1}
    found = measure(config(accum_steps=[1, 2, 3, 8], num_steps=1, frontier=small), setup)
    assert any("more than the 5% by which flat is told" in finding for finding in found.findings) is doubted
    assert found.findings[0].startswith("By the fit, the curve flattens at")


def test_one_round_in_a_time_that_was_too_short_for_more_is_said(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    time_points = sweep.time_points
    monkeypatch.setattr(sweep, "time_points", lambda *args, **given: time_points(*args, **{**given, "repeats": 1}))
    assert any("left time for one round alone" in finding for finding in measure(config(), setup).findings)


def test_the_findings_say_where_it_flattens_and_what_the_optimizer_s_share_is(outcome: Outcome) -> None:
    said = "\n".join(outcome.findings)
    assert f"flattens at effective batch {outcome.metrics['flattens_at_effective_batch']}" in said
    assert "71% at N=1, 56% at N=2, 33% at N=5" in said
    assert "At effective batch 12, micro-batches of 12 are fastest" in said
    assert "100 GFLOP/s" in said


def test_two_runs_differ_in_times_alone(outcome: Outcome, setup: Setup) -> None:
    again = measure(config(), setup_without_momentum(setup))
    for first, second in zip(outcome.tables["steps"], again.tables["steps"], strict=True):
        timeless = ("step", "effective_batch", "micro_batch", "accum_steps", "loss", "grad_norm", "sync_calls")
        assert {key: first[key] for key in timeless} == {key: second[key] for key in timeless}


def setup_without_momentum(setup: Setup) -> Setup:
    return replace(setup, optimizers=replace(setup.optimizers, sgd=replace(setup.optimizers.sgd, momentum=0.0)))


def test_a_point_of_both_sweeps_is_measured_once(setup: Setup) -> None:
    shared_point = measure(
        config(accum_steps=[1, 4], frontier={"effective_batch": 12, "micro_batch": [3], "num_steps": 2}), setup
    )
    assert len(shared_point.tables["steps"]) == 2 * 8
    assert shared_point.curve.points[1]["steps"] == shared_point.tables["frontier"][0]["steps"] == 8


def test_a_sync_on_every_micro_batch_is_found(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def eager(*args: Any, **options: Any) -> Accumulator:
        return Accumulator(*args, **options, sync="every")

    monkeypatch.setattr(timing, "Accumulator", eager)
    failures = measure(config(), setup).failures
    assert any(failure.startswith("3 x 5: gradients synced 40 times in 8 steps") for failure in failures)


def with_workload(setup: Setup, name: str) -> Setup:
    options = {"in_features": 5, "hidden": 7, "out_features": 3, "samples": 10}
    return replace(setup, workload=WorkloadChoice.parse({"name": name, "synthetic": options}))


@pytest.mark.parametrize("workload", ["definitions", "synthetic"])
def test_it_measures_other_workloads_too(workload: str, make_setup: Callable[..., Setup]) -> None:
    setup = with_workload(make_setup(), workload)
    small = {"effective_batch": 4, "micro_batch": [1, 4], "num_steps": 1}
    result = measure(config(accum_steps=[1, 3], num_steps=1, frontier=small, optimizer="adamw"), setup)
    assert not result.failures
    assert result.curve.points[0]["series"] == "adamw"


def test_more_micro_batches_than_an_epoch_go_through_it_again(make_setup: Callable[..., Setup]) -> None:
    setup = with_workload(make_setup(), "synthetic")
    small = {"effective_batch": 32, "micro_batch": [16, 32], "num_steps": 1}
    assert not measure(config(accum_steps=[1, 16], frontier=small), setup).failures


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"frontier": {"effective_batch": 12, "micro_batch": [5], "num_steps": 2}}, "micro_batch holds 5, which does"),
        ({"frontier": {"effective_batch": 12, "micro_batch": [3, 3], "num_steps": 2}}, "holds 3 more than once"),
        ({"accum_steps": [2]}, "throughput.accum_steps = .* is not allowed"),
        ({"accum_steps": [2, 2]}, "accum_steps holds 2 more than once"),
        ({"seconds": 0}, "throughput.seconds = 0 is not allowed"),
        ({"accum_steps": [1, 10**9]}, "throughput.accum_steps.1 = 1000000000 .* less than or equal to 1048576"),
        ({"micro_batch": 10**9}, "throughput.micro_batch = 1000000000 .* less than or equal to 65536"),
        ({"num_steps": 10**9}, "throughput.num_steps = 1000000000 .* less than or equal to 10000"),
        ({"repeats": 10**9}, "throughput.repeats = 1000000000 .* less than or equal to 100"),
    ],
)
def test_a_value_that_cannot_be_right_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(**changes)


def test_a_step_shorter_than_what_is_paid_once_still_leaves_its_micro_batch_some_time(
    monkeypatch: pytest.MonkeyPatch, setup: Setup
) -> None:
    def timed(timer: timing.Timer, accumulator: Accumulator, window: Sequence[Batch]) -> timing.TimedStep:
        del timer
        result = accumulator.step(window)
        noisy = result.samples == 12 and result.micro_batches == 1
        return timing.TimedStep(result, 0.3 if noisy else 0.2 * len(window) + 0.5)

    monkeypatch.setattr(timing.Timer, "timed", timed)
    rows = measure(config(), setup).tables["frontier"]
    assert [row["t_micro_ms"] for row in rows if row["micro_batch"] == 12] == [pytest.approx(0.3)]


def test_what_is_logged_over_steps_can_be_read_back_from_the_files(outcome: Outcome, tmp_path: Path) -> None:
    logged, read = logged_and_read_back(outcome, tmp_path)
    assert logged
    assert read == logged

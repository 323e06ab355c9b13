from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from gradaccum import Accumulator, ConfigError
from gradaccum.config import read_params, shared
from gradaccum.engine.accumulator import StepResult
from gradaccum.engine.batching import Batch
from gradaccum.measurements import points, rank_sweep
from gradaccum.measurements.bench import Bench
from gradaccum.measurements.distributed import Config, measure
from gradaccum.measurements.rank_results import outcome_of
from gradaccum.measurements.rank_timing import RankTimer, slowest, time_ways
from gradaccum.measurements.setup import Setup, no_progress
from gradaccum.measurements.spread import Way
from gradaccum.results.outcome import Outcome
from tests.distributed.pool import Pool


def config(**changes: Any) -> Config:
    given: dict[str, Any] = {
        "world_size": 2,
        "strategies": ["ddp", "fsdp2"],
        "micro_batch": 4,
        "accum_steps": [1, 3],
        "num_steps": 2,
        "repeats": 2,
        "seconds": 60.0,
        "optimizer": "adamw",
        "tolerance": 1e-4,
        "timeout_s": 20,
    }
    return Config(**{**given, **changes})


def measured(config: Config, setup: Setup) -> Outcome:
    """What `measure` does in the process group that torchrun would make."""
    return outcome_of(rank_sweep.sweep(config, setup, no_progress), config)


PARTS = {"t_micro_ms": 0.4, "t_sync_ms": 1.5, "t_step_ms": 2.0}


def made_of_parts(timer: RankTimer, accumulator: Accumulator, window: Sequence[Batch]) -> tuple[StepResult, float]:
    """A step whose time is what the model says."""
    del timer
    step = accumulator.step(window)
    counts = (step.micro_batches, step.sync_calls, 1)
    return step, sum(count * ms for count, ms in zip(counts, PARTS.values(), strict=True))


def measured_with_known_times(config: Config, setup: Setup) -> Outcome:
    timed, RankTimer.timed = RankTimer.timed, made_of_parts
    try:
        return measured(config, setup)
    finally:
        RankTimer.timed = timed


@pytest.fixture(scope="module")
def outcome(ranks: Pool) -> Outcome:
    return ranks(2, measured_with_known_times, config(), shared(read_params(), Setup))[0]


def test_every_way_over_ranks_is_the_full_batch(outcome: Outcome) -> None:
    assert outcome.failures == []
    assert outcome.metrics["equivalent"] is True
    assert outcome.metrics["max_grad_rel_diff_float64"] < 1e-14
    assert outcome.metrics["optimizer_steps_per_window"] == 1


def test_the_usual_mistake_over_ranks_is_rejected(outcome: Outcome) -> None:
    assert outcome.metrics["mean_of_rank_means_rejected"] is True
    (control,) = (point for point in outcome.curve.points if point["series"].startswith("control/"))
    assert control["grad_rel_diff_float64"] > 1e-3
    assert control["cut"] == [[4, 2], [4, 4, 4, 4, 2]] or control["cut"] == [[2], [4, 2]]


def test_syncing_last_reduces_once_and_every_time_n_times(outcome: Outcome) -> None:
    points = {(each["series"], each["accum_steps"]): each for each in outcome.curve.points if "reductions" in each}
    for strategy in ("ddp", "fsdp2"):
        once = points[f"{strategy}/last", 1]
        for steps in (1, 3):
            last, every = points[f"{strategy}/last", steps], points[f"{strategy}/every", steps]
            assert last["reductions"] == once["reductions"] > 0
            assert every["reductions"] == steps * once["reductions"]
            assert every["reduced_bytes"] == steps * last["reduced_bytes"]
            assert (last["sync_calls"], every["sync_calls"]) == (last["steps"], steps * every["steps"])
        assert outcome.metrics[f"{strategy}/reduced_bytes_ratio"] == 3
    assert points["ddp/last", 3]["gathered_bytes"] == 0
    assert points["fsdp2/gathered", 3]["gathered_bytes"] < points["fsdp2/last", 3]["gathered_bytes"]


def test_points_carry_what_the_schema_promises(outcome: Outcome) -> None:
    assert outcome.curve.x == "accum_steps"
    assert next(iter(outcome.curve.series())) == "ddp/last"
    for point in outcome.curve.points:
        assert point["world_size"] == 2
        assert point["effective_batch"] == 4 * 2 * point["accum_steps"] or "cut" in point
    assert {"ddp/last/uneven", "fsdp2/every/uneven"} <= set(outcome.curve.series())


def test_times_come_with_intervals_and_their_model_with_its_error(outcome: Outcome) -> None:
    for point in outcome.curve.points:
        if "median_step_ms" in point:
            assert point["rounds"] == 2
            syncs = point["accum_steps"] if point["series"].endswith("every") else 1
            expected = pytest.approx(0.4 * point["accum_steps"] + 1.5 * syncs + 2.0)
            assert [point["step_ms_low"], point["median_step_ms"], point["step_ms_high"]] == [expected] * 3
            assert point["fitted_step_ms"] == (None if point["series"].endswith("gathered") else expected)
    ratio = (3 * 0.4 + 3 * 1.5 + 2.0) / (3 * 0.4 + 1.5 + 2.0)
    for strategy in ("ddp", "fsdp2"):
        for name, true in {**PARTS, "step_time_ratio": ratio}.items():
            found = [outcome.metrics[f"{strategy}/{name}{end}"] for end in ("_low", "", "_high")]
            assert found == [pytest.approx(true)] * 3
        assert outcome.metrics[f"{strategy}/max_rel_residual"] == pytest.approx(0, abs=1e-9)


def all_points() -> list[tuple[str, int, list[list[float]]]]:
    """What every rank holds for the walls of every point."""
    setup = shared(read_params(), Setup)
    hurried = config(strategies=["ddp"], seconds=1e-6, num_steps=3)
    timed = time_ways(Bench.prepare(setup), hurried, setup, progress=no_progress)
    return [(each.way.name, each.plan.accum_steps, [visit.wall_ms for visit in each.point.visits]) for each in timed]


def test_ranks_agree_on_every_step_s_time_and_on_when_to_stop(ranks: Pool) -> None:
    first, second = ranks(2, all_points)
    assert first == second
    assert [(name, steps) for name, steps, _ in first] == [
        (f"ddp/{sync}", steps) for sync in ("last", "every") for steps in (1, 3)
    ]
    assert all(len(visits) == 1 and len(visits[0]) == 1 for *_, visits in first)


def apart() -> list[float]:
    return slowest([1.0 + dist.get_rank(), 5.0 - dist.get_rank()])


def test_a_step_takes_as_long_as_on_its_slowest_rank(ranks: Pool) -> None:
    assert ranks(2, apart) == [[2.0, 5.0]] * 2


def syncing_every_time(config: Config, setup: Setup) -> Outcome:
    """Whatever was asked for."""
    way = Way.accumulator
    Way.accumulator = lambda self, *args, **options: way(dataclasses.replace(self, sync="every"), *args, **options)
    try:
        return measured(config, setup)
    finally:
        Way.accumulator = way


def test_a_window_that_syncs_too_often_fails_the_claim(ranks: Pool, setup: Setup) -> None:
    failures = ranks(2, syncing_every_time, config(strategies=["ddp"]), setup)[0].failures
    assert "rank 0: ddp, N=3: 3 reductions a window with sync='last' and 3 with 'every', not 3 times." in failures
    assert any(failure.startswith("rank 1: ddp, N=3: some window of sync='last'") for failure in failures)


def on_a_restless_machine(config: Config, setup: Setup) -> Outcome:
    """No visit is fast enough, not even beside itself."""
    shift, points.SHIFT = points.SHIFT, 0.0
    try:
        return measured(config, setup)
    finally:
        points.SHIFT = shift


def test_visits_that_the_machine_disturbed_are_said(ranks: Pool, setup: Setup) -> None:
    small = config(strategies=["ddp"], accum_steps=[2], num_steps=1)
    outcome = ranks(2, on_a_restless_machine, small, setup)[0]
    assert outcome.metrics["disturbed_visits"] == 4
    (said,) = (finding for finding in outcome.findings if finding.startswith("The machine disturbed 4 of 4 visits"))
    assert said.endswith("measure again on a quieter machine.")


def undivided(config: Config, setup: Setup) -> Outcome:
    """Rank 1 alone weighs its part twice."""
    shares = Accumulator._shares

    def wrong(self: Accumulator, totals: Any) -> list[float]:
        return [share * (1 + dist.get_rank()) for share in shares(self, totals)]

    Accumulator._shares = wrong
    try:
        return measured(config, setup)
    finally:
        Accumulator._shares = shares


def test_a_wrong_gradient_fails_the_claim_and_is_named(ranks: Pool, setup: Setup) -> None:
    outcome = ranks(2, undivided, config(strategies=["ddp"], accum_steps=[2]), setup)[0]
    assert outcome.metrics["equivalent"] is False
    assert any("ddp/last, N=2: in float64 the gradient of" in failure for failure in outcome.failures)
    assert any("unevenly shared" in failure for failure in outcome.failures)


def stepping_twice_on_one_rank(config: Config, setup: Setup) -> Outcome:
    advance = Accumulator._advance

    def twice(*args: Any) -> None:
        for _ in range(1 + dist.get_rank()):
            advance(*args)

    Accumulator._advance = twice
    try:
        return measured(config, setup)
    finally:
        Accumulator._advance = advance


def test_an_optimizer_that_steps_twice_on_one_rank_fails_the_claim(ranks: Pool, setup: Setup) -> None:
    failures = ranks(2, stepping_twice_on_one_rank, config(strategies=["ddp"], accum_steps=[2]), setup)[0].failures
    assert "rank 0: ddp/last, N=2: the optimizer stepped 2 times in one window on some rank, not once." in failures


@pytest.mark.parametrize("workload", ["dictionary", "definitions"])
def test_text_is_the_full_batch_over_ranks_as_well(
    ranks: Pool, make_setup: Callable[..., Setup], workload: str
) -> None:
    """Tied weights, and targets that differ by rank."""
    small = config(micro_batch=1, accum_steps=[2], num_steps=1, optimizer="sgd")
    assert ranks(2, measured, small, make_setup(workload))[0].failures == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 1}, "world_size"),
        ({"strategies": ["zero"]}, "strategies"),
        ({"strategies": []}, "strategies"),
        ({"strategies": ["ddp", "ddp"]}, "ddp more than once"),
        ({"accum_steps": [1], "micro_batch": 1}, "could not tell right from wrong"),
        ({"tolerance": 0.0}, "tolerance"),
    ],
    ids=str,
)
def test_a_section_that_cannot_be_right_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_one_process_is_told_how_to_start_several(setup: Setup) -> None:
    with pytest.raises(ConfigError, match="torchrun --standalone --nproc-per-node=2"):
        measure(config(), setup)


def test_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"started 4 ranks, but distributed.world_size is 2"):
        measure(config(), setup)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gradaccum.engine.accumulator import Accumulator
from gradaccum.engine.batching import BatchPlan
from gradaccum.measurements import sweep
from gradaccum.measurements.setup import Setup
from gradaccum.measurements.throughput import Config, measure
from gradaccum.results.outcome import Outcome

REQUIRED = {"avg_loss", "samples_per_sec", "median_step_ms", "sync_calls", "steps"}


def config(**changes: Any) -> Config:
    given: dict[str, Any] = {
        "micro_batch": 4,
        "accum_steps": [1, 2, 4],
        "num_steps": 3,
        "repeats": 2,
        "optimizer": "sgd",
    }
    return Config(**{**given, **changes})


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    from gradaccum.config import read_params, shared

    return measure(config(), shared(read_params(), Setup))


def test_every_point_carries_what_the_schema_promises(outcome: Outcome) -> None:
    assert outcome.curve.x == "effective_batch"
    assert [point["effective_batch"] for point in outcome.curve.points] == [4, 8, 16]
    for point in outcome.curve.points:
        assert point.keys() >= REQUIRED
        assert point["steps"] == 6
        assert point["samples_per_sec"] > 0


def test_gradients_sync_once_a_step_and_that_is_counted(outcome: Outcome) -> None:
    assert [point["sync_calls"] for point in outcome.curve.points] == [6, 6, 6]
    assert outcome.failures == []


def test_syncing_on_every_micro_batch_fails_the_claim(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    built = Accumulator.__init__

    def every(self: Accumulator, *args: Any, **options: Any) -> None:
        built(self, *args, **{**options, "sync": "every"})

    monkeypatch.setattr(Accumulator, "__init__", every)
    failures = measure(config(), setup).failures
    assert failures == [
        "N=2: gradients synced 12 times in 6 steps, not once a step.",
        "N=4: gradients synced 24 times in 6 steps, not once a step.",
    ]


def test_there_is_a_record_of_every_optimizer_step(outcome: Outcome) -> None:
    rows = [row for row in outcome.tables["steps"] if row["accum_steps"] == 2]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert row["samples_per_sec"] == pytest.approx(1000 * 8 / row["wall_ms"])
        assert row["sync_calls"] == 1


def test_all_but_timings_repeats(outcome: Outcome, setup: Setup) -> None:
    again = measure(config(), setup)
    for one, other in zip(outcome.tables["steps"], again.tables["steps"], strict=True):
        for key in ("step", "accum_steps", "loss", "grad_norm", "sync_calls"):
            assert one[key] == other[key]
    assert [p["avg_loss"] for p in outcome.curve.points] == [p["avg_loss"] for p in again.curve.points]


def test_every_round_visits_every_point_in_an_order_of_its_own() -> None:
    plans = [BatchPlan(4 * steps, 4) for steps in (1, 2, 4, 8, 16)]
    visited = sweep.shuffled_rounds(plans, 4, seed=7)
    rounds = [tuple(visited[start : start + 5]) for start in range(0, 20, 5)]
    assert all(set(each) == set(plans) for each in rounds)
    assert len(set(rounds)) > 1


def test_batches_are_made_before_the_clock_starts(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    events: list[str] = []
    micro_batch, timed = sweep.Bench.micro_batch, sweep.Timer.timed
    monkeypatch.setattr(sweep.Bench, "micro_batch", lambda *args: events.append("batch") or micro_batch(*args))
    monkeypatch.setattr(sweep.Timer, "timed", lambda *args: events.append("clock") or timed(*args))
    measure(config(), setup)
    assert "batch" not in events[events.index("clock") :]


def test_the_headline_is_the_fit_of_the_points(outcome: Outcome) -> None:
    metrics = outcome.metrics
    assert metrics["peak_samples_per_sec"] == max(point["samples_per_sec"] for point in outcome.curve.points)
    assert metrics["flattens_at_effective_batch"] % 4 == 0
    for point in outcome.curve.points:
        assert point["fitted_step_ms"] == pytest.approx(
            point["accum_steps"] * metrics["t_micro_ms"] + metrics["t_step_ms"]
        )


def test_where_it_flattens_is_said_in_a_sentence(outcome: Outcome) -> None:
    assert any("flattens at effective batch" in finding for finding in outcome.findings)


@pytest.mark.parametrize("workload", ["dictionary", "definitions"])
def test_text_is_measured_as_well(make_setup: Callable[..., Setup], workload: str) -> None:
    outcome = measure(config(micro_batch=1, accum_steps=[1, 8], num_steps=3, repeats=1), make_setup(workload))
    assert outcome.failures == []

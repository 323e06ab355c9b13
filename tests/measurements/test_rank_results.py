"""How sure the times over ranks are, from made-up rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gradaccum import BatchPlan
from gradaccum.measurements.points import Point, TimedStep, Visit
from gradaccum.measurements.rank_results import Fitted, ratio_interval
from gradaccum.measurements.rank_timing import Timed
from gradaccum.measurements.spread import Way
from gradaccum.results.sync_fit import SyncTimeFit


def timed_at(*rounds: Sequence[float]) -> Timed:
    plan = BatchPlan(8, 4, 2)
    step: Any = None  # what it found plays no part
    visits = tuple(Visit(plan, tuple(TimedStep(step, ms) for ms in walls), 1.0) for walls in rounds)
    return Timed(Point(plan, visits, 0), Way("ddp", "last"))


def test_what_slows_a_whole_round_leaves_the_ratio_of_two_times_as_sure() -> None:
    paired = ratio_interval(timed_at([2.0], [4.0, 4.0], [6.2]), timed_at([1.0], [2.0], [3.0, 3.0]))
    assert paired is not None
    assert 1.9 < paired.low < 2 < paired.high < 2.2
    assert ratio_interval(timed_at([2.0], [4.0]), timed_at([1.0])) is None


def test_parts_that_differ_by_round_give_an_interval_that_ends_at_no_negative_time() -> None:
    rounds = [SyncTimeFit(1.0, 2.0, step, 0.0) for step in (0.0, 0.0, 3.0)]
    step = Fitted(rounds[0], rounds).part("t_step_ms")
    assert (step["t_step_ms"], step["t_step_ms_low"]) == (0.0, 0.0)
    assert step["t_step_ms_high"] == pytest.approx(1 + 4.302653)
    assert Fitted(rounds[0], rounds[:1]).part("t_step_ms")["t_step_ms_high"] is None

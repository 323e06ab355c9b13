from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom

from gradaccum.results.intervals import Interval, first_reached, geometric_interval, mean_interval, shown


def test_three_values_have_students_interval() -> None:
    interval = mean_interval([1.0, 2.0, 3.0])
    assert interval.mean == 2.0
    assert interval.high - interval.mean == pytest.approx(4.302653 / math.sqrt(3))
    assert interval.mean - interval.low == pytest.approx(interval.high - interval.mean)
    assert set(interval.fields("loss")) == {"loss", "loss_low", "loss_high"}


def test_nineteen_of_twenty_intervals_hold_the_true_mean() -> None:
    draws = np.random.default_rng(0).normal(5.0, 2.0, size=(2000, 4))
    held = sum(interval.low < 5.0 < interval.high for interval in map(mean_interval, draws))
    least, most = binom.interval(0.999, 2000, 0.95)
    assert least <= held <= most


@pytest.mark.parametrize("rounds", [2, 3, 6])
def test_nineteen_of_twenty_intervals_over_the_rounds_of_a_stage_hold_the_true_time(rounds: int) -> None:
    """Rounds differ by a fifth, more than the steps within one do."""
    random = np.random.default_rng(0)
    steps = random.normal(5, 1, size=(2000, rounds, 1)) + random.normal(0, 0.5, size=(2000, rounds, 25))
    medians = np.median(steps, axis=2)
    held = sum(interval.low < 5.0 < interval.high for interval in map(geometric_interval, medians))
    least, most = binom.interval(0.999, 2000, 0.95)
    assert least <= held <= most


def test_the_interval_of_times_is_that_of_their_logarithms_and_holds_nothing_below_0() -> None:
    interval, logs = geometric_interval([1.0, 10.0]), mean_interval([0.0, 1.0])
    assert (interval.mean, interval.low, interval.high) == pytest.approx((10**logs.mean, 10**logs.low, 10**logs.high))
    assert 0 < interval.low < mean_interval([1.0, 10.0]).high


def test_an_interval_is_shown_with_its_mean_and_nothing_as_a_dash() -> None:
    row = {"x": 1.0, "x_low": -0.25, "x_high": 2.0, "y": None, "y_low": None, "y_high": None}
    assert [shown(row, "x", "+.2g"), shown(row, "y", "+.2g")] == ["+1 (-0.25 to +2)", "-"]


def test_what_cannot_be_is_cut_off_an_interval() -> None:
    assert Interval(1.0, -2.0, 4.0).at_least(0.0) == Interval(1.0, 0.0, 4.0)
    assert Interval(1.0, 0.5, 4.0).at_least(0.0) == Interval(1.0, 0.5, 4.0)


@pytest.mark.parametrize(("level", "expected"), [(3.0, 0), (2.0, 10), (1.0, 20), (0.5, 32.5), (0.1, None)])
def test_a_level_is_reached_on_the_line_between_two_points(level: float, expected: float | None) -> None:
    assert first_reached([0, 20, 40], [3.0, 1.0, 0.2], level) == pytest.approx(expected)


def test_a_level_counts_where_it_is_first_reached_and_nulls_are_no_points() -> None:
    assert first_reached([0, 10, 20, 30], [2.0, 0.5, 2.0, 0.5], 1.0) == pytest.approx(20 / 3)
    assert first_reached([0, 10, 20], [2.0, None, None], 1.0) is None

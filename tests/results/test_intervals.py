from __future__ import annotations

import math

import numpy as np
import pytest

from gradaccum.results.intervals import first_reached, mean_interval


def test_three_values_have_students_interval() -> None:
    interval = mean_interval([1.0, 2.0, 3.0])
    assert interval.mean == 2.0
    assert interval.high - interval.mean == pytest.approx(4.302653 / math.sqrt(3))
    assert interval.mean - interval.low == pytest.approx(interval.high - interval.mean)
    assert set(interval.fields("loss")) == {"loss", "loss_low", "loss_high"}


def test_nineteen_of_twenty_intervals_hold_the_true_mean() -> None:
    draws = np.random.default_rng(0).normal(5.0, 2.0, size=(2000, 4))
    held = sum(interval.low < 5.0 < interval.high for interval in map(mean_interval, draws))
    assert held / 2000 == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize(("level", "expected"), [(3.0, 0), (2.0, 10), (1.0, 20), (0.5, 32.5), (0.1, None)])
def test_a_level_is_reached_on_the_line_between_two_points(level: float, expected: float | None) -> None:
    assert first_reached([0, 20, 40], [3.0, 1.0, 0.2], level) == pytest.approx(expected)


def test_a_level_counts_where_it_is_first_reached_and_nulls_are_no_points() -> None:
    assert first_reached([0, 10, 20, 30], [2.0, 0.5, 2.0, 0.5], 1.0) == pytest.approx(20 / 3)
    assert first_reached([0, 10, 20], [2.0, None, None], 1.0) is None

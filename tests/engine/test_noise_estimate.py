"""From what windows told to the noise scale: its interval, and its drift."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.signal import lfilter
from scipy.stats import binom

from gradaccum.engine.noise_estimate import WindowNoise, estimate, in_parts
from gradaccum.errors import BatchError

TRACE = 30.0


def process(windows: int, *, correlation: float, generator: np.random.Generator) -> NDArray[np.float64]:
    """An autoregressive process of mean 0 and variance 1: each value depends on the one before."""
    shocks = generator.standard_normal(windows + 100) * math.sqrt(1 - correlation**2)
    return np.asarray(lfilter([1.0], [1.0, -correlation], shocks))[100:]


def run(grad_sq_norms: NDArray[np.float64], generator: np.random.Generator) -> list[WindowNoise]:
    """Windows of 5 micro-batches, their traces spread as those of Gaussian gradients are, with mean `TRACE`."""
    traces = TRACE * generator.chisquare(20, len(grad_sq_norms)) / 20
    return [WindowNoise(float(trace), float(square), 4) for trace, square in zip(traces, grad_sq_norms, strict=True)]


def test_numerator_and_denominator_are_averaged_before_they_are_divided() -> None:
    windows = [WindowNoise(1.0, 0.01, 3), WindowNoise(3.0, 1.0, 3)]
    assert estimate(windows).noise_scale == pytest.approx(4.0 / 1.01)  # a mean of ratios would be 51.5


def test_a_window_weighs_as_many_comparisons_as_it_holds() -> None:
    windows = [WindowNoise(1.0, 1.0, 1), WindowNoise(5.0, 1.0, 3)]
    assert estimate(windows).noise_scale == pytest.approx(4.0)


def test_a_gradient_lost_in_noise_has_an_infinite_noise_scale_and_no_upper_bound() -> None:
    draws = np.random.default_rng(0).normal(size=30)
    found = estimate([WindowNoise(1.0, float(draw - draws.mean() - 0.1), 1) for draw in draws])
    assert found.noise_scale == math.inf
    assert 0 < found.low < found.high == math.inf


@pytest.mark.parametrize(
    ("windows", "runs", "correlation"), [(200, 1, 0.0), (900, 1, 0.8), (24, 3, 0.0), (6, 3, 0.0), (12, 1, 0.0)]
)
def test_nineteen_of_twenty_intervals_hold_the_true_noise_scale(windows: int, runs: int, correlation: float) -> None:
    generator, repetitions, held = np.random.default_rng(0), 400, 0
    for _ in range(repetitions):
        squares = [1 + process(windows, correlation=correlation, generator=generator) for _ in range(runs)]
        found = estimate(*(run(each, generator) for each in squares))
        held += found.low < TRACE < found.high
    least, most = binom.interval(0.999, repetitions, 0.95)
    assert least <= held <= most


def test_where_it_drifts_each_quarter_has_its_own_and_all_together_give_one_that_none_had() -> None:
    generator, repetitions = np.random.default_rng(0), 200
    means = np.repeat([4.0, 1.0, 0.5, 0.25], 60)
    held, pooled = np.zeros(4), np.zeros(4)
    for _ in range(repetitions):
        windows = run(means * (1 + 0.5 * generator.standard_normal(240)), generator)
        whole = estimate(windows)
        for index, part in enumerate(in_parts(windows, 4)):
            true, found = TRACE / means[60 * index], estimate(part)
            held[index] += found.low < true < found.high
            pooled[index] += whole.low < true < whole.high
    assert (held >= binom.ppf(0.001, repetitions, 0.95)).all()
    assert (pooled < 0.1 * repetitions)[[0, 2, 3]].all()


def test_one_window_sets_no_bounds_and_another_run_does() -> None:
    (one,), (other,) = (run(np.ones(1), np.random.default_rng(seed)) for seed in range(2))
    assert (estimate([one]).low, estimate([one]).high) == (0.0, math.inf)
    assert estimate([one], [other]).high < math.inf


def test_runs_add_up_and_no_block_reaches_from_one_into_the_next() -> None:
    generator = np.random.default_rng(0)
    one, other = (run(1 + 0.1 * generator.standard_normal(36), generator) for _ in range(2))
    both = estimate(one, other)
    assert both.windows == 72
    assert both.noise_scale == pytest.approx(estimate([*one, *other]).noise_scale)
    assert both == estimate(one, other)
    swapped = estimate(other, one)
    assert (swapped.low, swapped.high) == pytest.approx((both.low, both.high))
    assert estimate(one, []).low == estimate(one).low


@pytest.mark.parametrize(("windows", "lengths"), [(8, [2, 2, 2, 2]), (10, [2, 3, 2, 3]), (4, [1, 1, 1, 1])])
def test_parts_are_consecutive_and_about_as_long(windows: int, lengths: list[int]) -> None:
    noted = [WindowNoise(float(number), 1.0, 1) for number in range(windows)]
    parts = in_parts(noted, 4)
    assert [len(part) for part in parts] == lengths
    assert [window for part in parts for window in part] == noted


def test_more_parts_than_windows_are_refused() -> None:
    with pytest.raises(BatchError, match="3 windows of 2 or more micro-batches are too few for 4 parts"):
        in_parts([WindowNoise(1.0, 1.0, 1)] * 3, 4)

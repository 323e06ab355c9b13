from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from gradaccum.engine.noise_scale import WindowNoise, estimate
from gradaccum.errors import ConfigError


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


def test_windows_that_depend_on_their_neighbours_widen_the_interval() -> None:
    generator = np.random.default_rng(0)
    independent = 1 + 0.3 * generator.standard_normal(240)
    runs = np.repeat(independent[:40], 6)
    found = [estimate([WindowNoise(1.0, float(value), 1) for value in values]) for values in (independent, runs)]
    assert (found[1].high - found[1].low) > 1.5 * (found[0].high - found[0].low)


@pytest.mark.parametrize("confidence", [95, 0, 1, -0.1, math.nan, "0.9"])
def test_a_confidence_that_is_no_share_is_refused(confidence: Any) -> None:
    with pytest.raises(ConfigError, match=r"is no share between 0 and 1"):
        estimate([WindowNoise(1.0, 0.1, 3)] * 4, confidence=confidence)

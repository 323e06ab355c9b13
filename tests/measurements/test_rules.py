from __future__ import annotations

import math

import pytest

from gradaccum.measurements.rules import scaled_beta2, scaled_lr, warm_up


@pytest.mark.parametrize(("scaling", "expected"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_learning_rate_follows_the_batch_by_its_rule(scaling: str, expected: float) -> None:
    assert scaled_lr(0.1, 4, scaling) == pytest.approx(expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("times", [1 / 64, 0.25, 1, 8])
def test_half_life_keeps_the_second_moments_half_life_in_samples(times: float) -> None:
    steps = [math.log(0.5) / math.log(beta2) for beta2 in (0.95, scaled_beta2(0.95, times, "half_life"))]
    assert steps[1] * times == pytest.approx(steps[0])
    assert scaled_beta2(0.95, times, "fixed") == 0.95


def test_warm_up_rises_in_a_straight_line_over_samples() -> None:
    shares = [warm_up(samples, over=100, start=0.25) for samples in (0, 50, 100, 1000)]
    assert shares == [0.25, 0.625, 1.0, 1.0]


def test_without_warm_up_the_first_step_has_the_whole_learning_rate() -> None:
    assert warm_up(0, over=0, start=0.25) == 1.0

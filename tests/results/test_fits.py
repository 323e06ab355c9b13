from __future__ import annotations

import math

import numpy as np
import pytest

from gradaccum.results.fits import FitError, fit_step_time

STEPS = [1, 2, 4, 8, 16, 32, 64]


def test_the_fit_recovers_the_times_that_made_the_points() -> None:
    fit = fit_step_time(STEPS, [0.2 * n + 0.5 for n in STEPS])
    assert (fit.t_micro_ms, fit.t_step_ms) == pytest.approx((0.2, 0.5))
    assert fit.max_rel_residual < 1e-12
    assert fit.step_ms(10) == pytest.approx(2.5)
    assert fit.step_share(1) == pytest.approx(0.5 / 0.7)


def test_noise_that_grows_with_the_time_does_not_drown_the_small_points() -> None:
    noise = 1 + 0.05 * np.random.default_rng(0).standard_normal(len(STEPS))
    fit = fit_step_time(STEPS, [(0.2 * n + 0.5) * each for n, each in zip(STEPS, noise, strict=True)])
    assert fit.t_micro_ms == pytest.approx(0.2, rel=0.1)
    assert fit.t_step_ms == pytest.approx(0.5, rel=0.2)


def test_the_curve_flattens_where_it_first_comes_within_five_percent_of_the_asymptote() -> None:
    fit = fit_step_time(STEPS, [0.2 * n + 0.5 for n in STEPS])
    steps = fit.flattens_at_accum_steps()
    rate = {n: 1000 * 4 * n / fit.step_ms(n) for n in (steps - 1, steps)}
    assert rate[steps] >= 0.95 * fit.asymptotic_samples_per_sec(4) > rate[steps - 1]
    assert steps == math.ceil(19 * 0.5 / 0.2 - 1e-9)


def test_a_flat_curve_is_flat_from_the_first_point() -> None:
    fit = fit_step_time(STEPS, [0.2 * n for n in STEPS])
    assert fit.flattens_at_accum_steps() == 1


def test_no_part_of_a_step_takes_negative_time() -> None:
    fit = fit_step_time([1, 2, 4], [1.0, 2.2, 5.0])
    assert fit.t_step_ms == 0
    assert fit.t_micro_ms > 0


def test_times_that_do_not_grow_are_refused() -> None:
    with pytest.raises(FitError, match=r"do not grow .* Raise num_steps"):
        fit_step_time([1, 2, 4], [3.0, 2.0, 1.0])

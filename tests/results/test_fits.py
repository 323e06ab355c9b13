from __future__ import annotations

import math

import numpy as np
import pytest

from gradaccum.results.fits import (
    FitError,
    Percentiles,
    bootstrap_medians,
    extrapolation_error,
    fit_replicates,
    fit_step_time,
)

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


def test_the_fit_of_the_small_points_is_judged_by_the_largest_one_which_it_has_not_seen() -> None:
    straight = [0.2 * n + 0.5 for n in STEPS]
    assert extrapolation_error(STEPS, straight) == pytest.approx(0, abs=1e-12)
    bent = [*straight[:-1], 2 * straight[-1]]
    assert extrapolation_error(STEPS, bent) == pytest.approx(-0.5)
    assert extrapolation_error(STEPS[::-1], bent[::-1]) == pytest.approx(-0.5)
    assert extrapolation_error([1, 2], [1.0, 2.0]) is None
    assert extrapolation_error([1, 2, 8], [3.0, 1.0, 8.0]) is None


def test_the_interval_of_a_median_holds_the_true_one_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    held = 0
    for seed in range(100):
        rounds = random.normal(5, 1, size=(8, 1)) + random.normal(0, 0.5, size=(8, 25))
        interval = Percentiles.of(bootstrap_medians(rounds.tolist(), seed=seed))
        held += interval.low <= 5 <= interval.high
    assert 80 <= held <= 99


def test_rounds_that_disagree_widen_the_interval_however_alike_their_own_steps_are() -> None:
    alike = Percentiles.of(bootstrap_medians([[1.0, 1.01] * 10] * 3, seed=0))
    apart = Percentiles.of(bootstrap_medians([[1.0, 1.01] * 10, [1.3, 1.31] * 10, [1.6, 1.61] * 10], seed=0))
    assert apart.high - apart.low > 10 * (alike.high - alike.low)


def test_the_bootstrap_gives_the_same_interval_each_time_and_takes_rounds_of_unequal_length() -> None:
    rounds = [[1.0, 2.0, 3.0, 9.0], [2.0, 3.0]]
    assert np.array_equal(bootstrap_medians(rounds, seed=7), bootstrap_medians(rounds, seed=7))
    assert not np.array_equal(bootstrap_medians(rounds, seed=7), bootstrap_medians(rounds, seed=8))


def test_the_fit_s_interval_holds_the_times_that_made_the_noisy_points() -> None:
    random = np.random.default_rng(1)
    rounds = [((0.2 * n + 0.5) * random.normal(1, 0.05, size=(4, 20))).tolist() for n in STEPS]
    fits = fit_replicates(STEPS, [bootstrap_medians(each, seed=0) for each in rounds])
    micro = Percentiles.of(fit.t_micro_ms for fit in fits)
    assert micro.low < 0.2 < micro.high
    assert micro.high - micro.low < 0.02

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom

from gradaccum.results.fits import FitError, extrapolation_error, fit_rounds, fit_step_time
from gradaccum.results.intervals import mean_interval

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


@pytest.mark.parametrize("rounds", [3, 6])
def test_nineteen_of_twenty_intervals_over_rounds_hold_the_times_that_made_the_points(rounds: int) -> None:
    random, repetitions, held = np.random.default_rng(0), 400, np.zeros(2)
    times = np.array([[0.2 * n + 0.5] for n in STEPS])
    for _ in range(repetitions):
        fits = fit_rounds(STEPS, (times * random.normal(1, 0.05, size=(len(STEPS), rounds))).tolist())
        for index, (name, true) in enumerate((("t_micro_ms", 0.2), ("t_step_ms", 0.5))):
            interval = mean_interval([getattr(fit, name) for fit in fits])
            held[index] += interval.low < true < interval.high
    least, most = binom.interval(0.999, repetitions, 0.95)
    assert ((least <= held) & (held <= most)).all()


def test_a_round_that_not_all_points_saw_is_left_out() -> None:
    fits = fit_rounds([1, 2], [[0.7, 0.8, 9.0], [0.9, 1.1]])
    assert [fit.t_micro_ms for fit in fits] == pytest.approx([0.2, 0.3])


def test_where_a_round_is_noise_alone_no_round_tells_how_sure_the_fit_is() -> None:
    assert fit_rounds([1, 2], [[0.7, 0.9], [0.9, 0.7]]) == []

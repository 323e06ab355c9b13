from __future__ import annotations

import pytest

from gradaccum.results.sync_fit import fit_sync_rounds, fit_sync_time

STEPS, SYNCS = [1, 4, 16, 4, 16], [1, 1, 1, 4, 16]


def times(t_micro: float, t_sync: float, t_step: float) -> list[float]:
    return [n * t_micro + syncs * t_sync + t_step for n, syncs in zip(STEPS, SYNCS, strict=True)]


def test_the_fit_recovers_the_parts_that_made_the_times() -> None:
    fit = fit_sync_time(STEPS, SYNCS, times(0.4, 1.5, 2.0))
    assert (fit.t_micro_ms, fit.t_sync_ms, fit.t_step_ms) == pytest.approx((0.4, 1.5, 2.0))
    assert fit.max_rel_residual < 1e-9
    assert fit.step_ms(8, 8) == pytest.approx(8 * 0.4 + 8 * 1.5 + 2.0)
    assert fit.explains


def test_a_fit_that_misses_a_point_by_far_explains_nothing() -> None:
    measured = times(0.4, 1.5, 2.0)
    measured[2] *= 3
    fit = fit_sync_time(STEPS, SYNCS, measured)
    assert not fit.explains
    assert fit.max_rel_residual == pytest.approx(
        max(abs(fit.step_ms(n, syncs) / ms - 1) for n, syncs, ms in zip(STEPS, SYNCS, measured, strict=True))
    )


def test_each_round_that_all_points_saw_is_fitted_by_itself() -> None:
    rounds = [(0.4, 1.5, 2.0), (0.5, 1.0, 3.0)]
    medians = [[*at, 9.0] for at in zip(*(times(*parts) for parts in rounds), strict=True)]
    medians[1].pop()
    fits = fit_sync_rounds(STEPS, SYNCS, medians)
    assert [(fit.t_micro_ms, fit.t_sync_ms, fit.t_step_ms) for fit in fits] == [pytest.approx(each) for each in rounds]

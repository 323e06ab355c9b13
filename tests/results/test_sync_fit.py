from __future__ import annotations

import numpy as np
import pytest

from gradaccum.results.fits import Percentiles
from gradaccum.results.sync_fit import fit_sync_replicates, fit_sync_time

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


def test_each_replicate_is_fitted_across_the_points() -> None:
    """So that the spread of the parts is what the spread of the points makes of it."""
    noise = 1 + 0.02 * np.random.default_rng(0).standard_normal((len(STEPS), 200))
    medians = [np.array(ms * each) for ms, each in zip(times(0.4, 1.5, 2.0), noise, strict=True)]
    fits = fit_sync_replicates(STEPS, SYNCS, medians)
    assert len(fits) == 200
    interval = Percentiles.of(fit.t_sync_ms for fit in fits)
    assert interval.low < 1.5 < interval.high
    assert interval.high - interval.low < 0.3

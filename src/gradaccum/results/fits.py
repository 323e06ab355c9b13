"""Fits and statistics over measured points; no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from gradaccum.errors import GradaccumError

RESAMPLES = 1000
"""Of the bootstrap: enough for two digits of an interval's ends."""


class FitError(GradaccumError, ValueError):
    """Points that the model cannot explain."""


POOR = 0.15
"""A point this far off the fit says that the fit does not describe the points."""


@dataclass(frozen=True)
class Percentiles:
    """95 % of what the bootstrap gave."""

    low: float
    high: float

    @classmethod
    def of(cls, replicates: Iterable[float] | NDArray[np.float64]) -> Percentiles:
        """The percentile interval."""
        low, high = np.percentile(np.fromiter(replicates, dtype=float), [2.5, 97.5]).tolist()
        return cls(low, high)


def ends(name: str, interval: Percentiles | None) -> dict[str, float | None]:
    """As fields of a point: `name_low`, `name_high`; null where there is no interval."""
    low, high = (interval.low, interval.high) if interval else (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


@dataclass(frozen=True)
class StepTimeFit:
    """`step time = accum_steps * t_micro + t_step`.

    Attributes:
        t_micro_ms: time of one micro-batch's forward and backward pass.
        t_step_ms: what a step costs once, however many micro-batches it has: the optimizer, and what surrounds it.
        max_rel_residual: largest distance of a measured point from the fit, relative to the point.
    """

    t_micro_ms: float
    t_step_ms: float
    max_rel_residual: float

    def step_ms(self, accum_steps: int) -> float:
        return accum_steps * self.t_micro_ms + self.t_step_ms

    def step_share(self, accum_steps: int) -> float:
        """Share of a step's time that is spent once a step."""
        return self.t_step_ms / self.step_ms(accum_steps)

    def asymptotic_samples_per_sec(self, micro_batch: int) -> float:
        """What the curve approaches as `accum_steps` grows."""
        return 1000 * micro_batch / self.t_micro_ms

    def flattens_at_accum_steps(self, within: float = 0.05) -> int:
        """First `accum_steps` whose samples per second lie within that share of the asymptote."""
        return max(1, math.ceil((1 - within) / within * self.t_step_ms / self.t_micro_ms - 1e-9))


def fit_step_time(accum_steps: Sequence[int], step_ms: Sequence[float]) -> StepTimeFit:
    """Least squares of relative residuals (timing noise grows with the time), with no negative part.

    Args:
        accum_steps: at least two different ones.
        step_ms: measured time of a step at each.

    Raises:
        FitError: the times do not grow with `accum_steps`.
    """
    assert len(set(accum_steps)) >= 2, "a line needs two points"
    times = np.asarray(step_ms, dtype=float)
    design = np.stack([np.asarray(accum_steps, dtype=float), np.ones(len(times))], axis=1) / times[:, None]
    (t_micro, t_step), _ = nnls(design, np.ones(len(times)))
    if not t_micro:
        shown = ", ".join(f"{time:.3g}" for time in times)
        raise FitError(
            f"step times of {shown} ms do not grow with accum_steps {list(accum_steps)}: the noise is larger than the "
            "signal. Raise num_steps or repeats, or add larger accum_steps."
        )
    residuals = design @ np.array([t_micro, t_step]) - 1
    return StepTimeFit(float(t_micro), float(t_step), float(np.abs(residuals).max()))


def extrapolation_error(accum_steps: Sequence[int], step_ms: Sequence[float]) -> float | None:
    """How far the fit of the smaller half of the points misses the largest one, relative to it.

    It says what residuals cannot: whether the model predicts a point that it has not seen. None below three points, and
    where the smaller half is noise.
    """
    points = sorted(zip(accum_steps, step_ms, strict=True))
    if len(points) < 3:
        return None
    small = points[: max(2, len(points) // 2)]
    try:
        fit = fit_step_time([steps for steps, _ in small], [time for _, time in small])
    except FitError:
        return None
    most, measured = points[-1]
    return fit.step_ms(most) / measured - 1


def bootstrap_medians(rounds: Sequence[Sequence[float]], *, seed: int) -> NDArray[np.float64]:
    """Medians of resampled measurements, `[RESAMPLES]`.

    Rounds are drawn first and measurements within them second (a two-stage bootstrap, Davison and Hinkley 1997, section
    3.8): steps of one round share what the machine did just then, and drawn alone they would feign certainty.
    """
    shortest = min(len(measured) for measured in rounds)
    measured = np.array([each[:shortest] for each in rounds])
    random = np.random.default_rng(seed)
    which = random.integers(len(rounds), size=(RESAMPLES, len(rounds), 1))
    steps = random.integers(shortest, size=(RESAMPLES, len(rounds), shortest))
    medians: NDArray[np.float64] = np.median(measured[which, steps], axis=(1, 2))
    return medians


def fit_replicates(accum_steps: Sequence[int], medians: Sequence[NDArray[np.float64]]) -> list[StepTimeFit]:
    """One fit a bootstrap replicate; `medians[i]` are the replicates of point `i`."""
    fits = []
    for replicate in np.stack(medians, axis=1):
        try:
            fits.append(fit_step_time(accum_steps, replicate.tolist()))
        except FitError:
            continue  # a draw of noise alone has no rate to report
    return fits

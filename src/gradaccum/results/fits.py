"""Fits and statistics over measured points; no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from gradaccum.errors import GradaccumError

FLAT = 0.05
"""How near the asymptote counts as flat. A fit that misses a point by more cannot tell well where that is."""


class FitError(GradaccumError, ValueError):
    """Points that the model cannot explain."""


POOR = 0.15
"""A point this far off the fit says that the fit does not describe the points."""


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

    def flattens_at_accum_steps(self) -> int:
        """First `accum_steps` whose samples per second lie within `FLAT` of the asymptote."""
        return max(1, math.ceil((1 - FLAT) / FLAT * self.t_step_ms / self.t_micro_ms - 1e-9))


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


def fit_rounds(accum_steps: Sequence[int], medians: Sequence[Sequence[float]]) -> list[StepTimeFit]:
    """One fit a round, so that how far rounds lie apart shows in what is fitted; none where a round is noise alone.

    Args:
        accum_steps: of each point.
        medians: of each point's step times, by round; a round that not all points saw is left out.
    """
    try:
        return [fit_step_time(accum_steps, times) for times in zip(*medians, strict=False)]
    except FitError:
        return []

"""What a step over ranks is made of; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

EXPLAINS = 0.15
"""A fit that misses a point by more than this share of it does not describe what was measured."""


@dataclass(frozen=True)
class SyncTimeFit:
    """`step time = accum_steps * t_micro + sync_calls * t_sync + t_step`.

    Attributes:
        t_micro_ms: time of one micro-batch's passes, without gradient sync.
        t_sync_ms: what one gradient sync adds.
        t_step_ms: what a step costs once, beside its sync.
        max_rel_residual: largest distance of a measured point from the fit, relative to the point.
    """

    t_micro_ms: float
    t_sync_ms: float
    t_step_ms: float
    max_rel_residual: float

    @property
    def explains(self) -> bool:
        return self.max_rel_residual <= EXPLAINS

    def step_ms(self, accum_steps: int, sync_calls: int) -> float:
        return accum_steps * self.t_micro_ms + sync_calls * self.t_sync_ms + self.t_step_ms


def fit_sync_time(accum_steps: Sequence[int], sync_calls: Sequence[int], step_ms: Sequence[float]) -> SyncTimeFit:
    """Least squares of relative residuals (timing noise grows with the time), with no negative part.

    What the points cannot tell apart (a sync from a step, where all have one) falls to one of the parts.
    """
    times = np.asarray(step_ms, dtype=float)
    counts = np.array([accum_steps, sync_calls, [1] * len(times)], dtype=float)
    design = (counts / times).T
    parts, _ = nnls(design, np.ones(len(times)))
    residual = float(np.abs(design @ parts - 1).max())
    t_micro, t_sync, t_step = parts.tolist()
    return SyncTimeFit(t_micro, t_sync, t_step, residual)


def fit_sync_rounds(
    accum_steps: Sequence[int], sync_calls: Sequence[int], medians: Sequence[Sequence[float]]
) -> list[SyncTimeFit]:
    """One fit a round; `medians[i]` are those of point `i`, by round. A round that not all points saw is left out."""
    return [fit_sync_time(accum_steps, sync_calls, times) for times in zip(*medians, strict=False)]

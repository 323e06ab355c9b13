"""From what windows told of their gradients' noise to the noise scale and its interval; no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from gradaccum.errors import BatchError, ConfigError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class WindowNoise:
    """Unbiased estimates from one window, at its parameters.

    With micro-batch gradients g_i over n_i targets, and their weighted mean g over n targets:
    `S = (sum of n_i |g_i|^2 - n |g|^2) / (N - 1)` and `|G|^2 = |g|^2 - S / n`. For equal n_i these are the paper's
    estimates with B_small = n_i and B_big = n; in this form they are unbiased for unequal counts too.

    Attributes:
        trace: S, trace of the covariance of one target's gradient; not negative.
        grad_sq_norm: |G|^2, squared norm of the true gradient; negative where noise hides it.
        weight: degrees of freedom behind `trace`, N - 1.
    """

    trace: float
    grad_sq_norm: float
    weight: int


@dataclass(frozen=True)
class NoiseScaleEstimate:
    """B_simple = S / |G|^2, in targets: the batch whose gradient is as much noise as signal.

    Attributes:
        noise_scale: infinite where no gradient stands out of the noise.
        low: lower end of the confidence interval.
        high: upper end; infinite where the windows set no bound.
        trace: S, averaged over the windows.
        grad_sq_norm: |G|^2, averaged over the windows.
        windows: how many there were.
    """

    noise_scale: float
    low: float
    high: float
    trace: float
    grad_sq_norm: float
    windows: int


def estimate(*runs: Sequence[WindowNoise], confidence: float = 0.95) -> NoiseScaleEstimate:
    """`mean(S) / mean(|G|^2)`: each mean is unbiased, the ratio within one window is not.

    Both means weigh a window by its degrees of freedom. The interval is over blocks: consecutive windows of a run,
    which depend on each other through the parameters, count as one draw. It is that of a stretch in which the noise
    scale stays about the same; over a longer one it is narrow around a value that no window had (see `in_parts`).

    Args:
        runs: windows in order; several runs (seeds) add up, each cut into blocks of its own.
        confidence: of the interval, which has no bounds where the windows make one block only.

    Raises:
        BatchError: there is no window.
        ConfigError: `confidence` is no share.
    """
    if not isinstance(confidence, Real) or not 0 < confidence < 1:
        raise ConfigError(
            f"confidence={confidence!r} is no share between 0 and 1, so no interval would hold it. Set it to 0.95, say."
        )
    windows = [window for run in runs for window in run]
    if not windows:
        raise BatchError(
            "no window had 2 micro-batches with targets, so there is no noise scale. Use accum_steps of at least 2."
        )
    traces, squares = np.concatenate([_block_sums(run) for run in runs if run], axis=1)
    low, high = _interval(traces, squares, confidence)
    weight = sum(window.weight for window in windows)
    return NoiseScaleEstimate(
        noise_scale=_scale(squares.sum(), traces.sum()),
        low=low,
        high=high,
        trace=float(traces.sum() / weight),
        grad_sq_norm=float(squares.sum() / weight),
        windows=len(windows),
    )


def in_parts(windows: Sequence[WindowNoise], parts: int) -> list[Sequence[WindowNoise]]:
    """One run's windows, cut into so many consecutive parts of about the same length.

    Raises:
        BatchError: there are fewer windows than parts.
    """
    if len(windows) < parts:
        raise BatchError(
            f"{len(windows)} windows of 2 or more micro-batches are too few for {parts} parts. Observe more windows, "
            "or ask for fewer parts."
        )
    ends = [len(windows) * part // parts for part in range(parts + 1)]
    return [windows[start:end] for start, end in pairwise(ends)]


def _block_sums(run: Sequence[WindowNoise]) -> Floats:
    """Weighted sums of S and of |G|^2, over blocks of about sqrt(n) consecutive windows.

    Source: Jones, Haran, Caffo and Neath 2006, Fixed-Width Output Analysis for Markov Chain Monte Carlo, Journal of the
    American Statistical Association 101:476, section 3 (batch means, with batches of sqrt(n)).
    """
    length = math.isqrt(len(run))
    values = np.array([(each.weight * each.trace, each.weight * each.grad_sq_norm) for each in run])
    blocks = np.array_split(values, len(run) // length)
    return np.array([block.sum(axis=0) for block in blocks]).T


def _interval(traces: Floats, squares: Floats, confidence: float) -> tuple[float, float]:
    """Bounds of S / |G|^2, by way of its inverse: S is never negative, while |G|^2 may well be, or pass through 0.

    Student's t, with the ratio's standard error over the blocks by the delta method.
    Source: Cochran 1977, Sampling Techniques, 3rd edition, section 6.4 (the variance of a ratio estimate).
    """
    blocks = len(traces)
    if blocks < 2 or not traces.all():
        return 0.0, math.inf
    inverse = squares.sum() / traces.sum()
    residuals = squares - inverse * traces
    error = math.sqrt(blocks / (blocks - 1) * (residuals**2).sum()) / traces.sum()
    reach = t.ppf((1 + confidence) / 2, blocks - 1) * error
    return _scale(inverse + reach, 1.0), _scale(inverse - reach, 1.0)


def _scale(square: float, trace: float) -> float:
    if not trace > 0:
        return 0.0
    return float(trace / square) if square > 0 else math.inf

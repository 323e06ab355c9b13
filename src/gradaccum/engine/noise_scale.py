"""The gradient noise scale, from the micro-batch gradients that accumulation computes anyway.

Source: McCandlish et al. 2018, An Empirical Model of Large-Batch Training, arXiv 1812.06162, appendix A.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Real

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import bootstrap, norm, t
from torch import Tensor, distributed, nn

from gradaccum.engine.observer import Note
from gradaccum.errors import BatchError, ConfigError

Floats = NDArray[np.float64]

RESAMPLES = 2000


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


class NoiseScale:
    """Observes an `Accumulator` (`observer=`) and measures the gradient noise scale, with no further backward pass.

    It costs one norm per parameter and micro-batch, and no copy of a gradient: hooks see what a backward pass is about
    to add. Counts may differ between micro-batches. A window in which fewer than two micro-batches had targets, or
    whose gradient was not finite, tells nothing and is left out.

    Over ranks, each watches its own micro-batches; `windows` and `estimate` add them up, so all ranks must call them.
    """

    def __init__(self) -> None:
        self._seen: list[Tensor] = []  # a window: sum of n_i |g_i|^2, N (both of this rank); n |g|^2, n (of all ranks)

    @contextmanager
    def watch(self, parameters: Sequence[nn.Parameter], *, micro_batches: int) -> Iterator[Note]:
        """Watch one window's backward passes.

        Gives a function to call after each with `(count, factor)`: the micro-batch's targets, and what its loss sum was
        multiplied by. `finish` must follow.

        Raises:
            BatchError: the first window has a single micro-batch, so the others will have no more.
        """
        if micro_batches * _world_size() == 1 and not self._seen:
            raise BatchError(
                "the window has 1 micro-batch, and the noise scale shows in how micro-batches differ. Use windows of 2 "
                "or more (accum_steps=2 with half the micro_batch keeps the effective batch), or drop the observer."
            )
        self._squares = _Squares()
        hooks = [
            each.register_hook(partial(self._squares.note, number))  # type: ignore[no-untyped-call]
            for number, each in enumerate(parameters)
            if each.requires_grad
        ]
        try:
            yield self._squares.end_micro_batch
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self, grad_norm: Tensor, count: float) -> None:
        """Take in the window that was watched.

        Args:
            grad_norm: L2 norm of its mean gradient (over all ranks), unscaled and before clipping.
            count: its targets (over all ranks).
        """
        whole = grad_norm.detach().double().square() * count
        own = self._squares.weighted_sum().to(whole)
        micro_batches, targets = whole.new_tensor([self._squares.micro_batches, count])
        self._seen.append(torch.stack([own, micro_batches, whole, targets]))

    def windows(self) -> list[WindowNoise]:
        """What each window told, in order."""
        if not self._seen:
            return []
        seen = torch.stack(self._seen)
        if _world_size() > 1:
            own = seen[:, :2].contiguous()
            distributed.all_reduce(own)
            seen = torch.cat([own, seen[:, 2:]], dim=1)
        return [_from_sums(*row) for row in seen.tolist() if row[1] >= 2 and all(map(math.isfinite, row))]

    def estimate(self, *, confidence: float = 0.95) -> NoiseScaleEstimate:
        """The noise scale over all windows so far.

        Raises:
            BatchError: no window had two micro-batches with targets.
            ConfigError: `confidence` is no share.
        """
        return estimate(self.windows(), confidence=confidence)


class _Squares:
    """Norms of one window's micro-batch gradients, parameter by parameter, left on their device."""

    def __init__(self) -> None:
        self.micro_batches = 0
        self._fresh: dict[int, Tensor] = {}
        self._norms: list[Tensor] = []
        self._weights: list[float] = []

    def note(self, parameter: int, gradient: Tensor) -> None:
        """The last gradient of a micro-batch counts: a loss that holds gradients itself (a penalty) makes others."""
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        self._fresh[parameter] = torch.linalg.vector_norm(gradient.detach(), dtype=dtype)

    def end_micro_batch(self, count: float, factor: float) -> None:
        """What was noted since the last call is `factor * count` times a mean gradient."""
        self._norms += self._fresh.values()
        self._weights += [1 / (count * factor**2)] * len(self._fresh)
        self._fresh.clear()
        self.micro_batches += 1

    def weighted_sum(self) -> Tensor:
        """Sum of n_i |g_i|^2."""
        if not self._norms:
            return torch.zeros(())
        norms = torch.stack(self._norms).double()
        return norms.square() @ norms.new_tensor(self._weights)


def estimate(windows: Sequence[WindowNoise], *, confidence: float = 0.95) -> NoiseScaleEstimate:
    """`mean(S) / mean(|G|^2)`: each mean is unbiased, the ratio within one window is not.

    Both means weigh a window by its degrees of freedom. The interval is a block bootstrap: consecutive windows, which
    depend on each other through the parameters, are resampled together.

    Raises:
        BatchError: there is no window.
        ConfigError: `confidence` is no share.
    """
    if not isinstance(confidence, Real) or not 0 < confidence < 1:
        raise ConfigError(
            f"confidence={confidence!r} is no share between 0 and 1, so no interval would hold it. Set it to 0.95, say."
        )
    if not windows:
        raise BatchError(
            "no window had 2 micro-batches with targets, so there is no noise scale. Use accum_steps of at least 2."
        )
    weight = np.array([window.weight for window in windows], dtype=float)
    traces = weight * [window.trace for window in windows]
    squares = weight * [window.grad_sq_norm for window in windows]
    low, high = _interval(_in_blocks(traces), _in_blocks(squares), confidence)
    return NoiseScaleEstimate(
        noise_scale=_scale(squares.sum(), traces.sum()),
        low=low,
        high=high,
        trace=float(traces.sum() / weight.sum()),
        grad_sq_norm=float(squares.sum() / weight.sum()),
        windows=len(windows),
    )


def _interval(traces: Floats, squares: Floats, confidence: float) -> tuple[float, float]:
    """Bounds of S / |G|^2, by way of its inverse: S is never negative, while |G|^2 may well be, or pass through 0."""
    if len(traces) < 2 or not traces.all():
        return 0.0, math.inf
    inverse = bootstrap(
        (squares, traces),
        lambda part, whole, axis: part.sum(axis=axis) / whole.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=_expanded(confidence, len(traces)),
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return _scale(inverse.high, 1.0), _scale(inverse.low, 1.0)


def _expanded(confidence: float, blocks: int) -> float:
    """The level at which a percentile interval over so few blocks is as wide as a t interval, not narrower.

    Source: Hesterberg 2014, What Teachers Should Know about the Bootstrap, arXiv 1411.5279, section 5.2 ("expanded
    percentile interval").
    """
    reach = math.sqrt(blocks / (blocks - 1)) * t.ppf((1 + confidence) / 2, blocks - 1)
    return float(norm.cdf(reach) - norm.cdf(-reach))


def _scale(square: float, trace: float) -> float:
    if not trace > 0:
        return 0.0
    return float(trace / square) if square > 0 else math.inf


def _in_blocks(values: Floats) -> Floats:
    """Sums over blocks of about n^(1/3) consecutive windows (the rate of Kuensch 1989, Annals of Statistics 17:3)."""
    length = math.ceil(len(values) ** (1 / 3))
    return np.add.reduceat(values, np.arange(0, len(values), length))


def _from_sums(own: float, micro_batches: float, whole: float, count: float) -> WindowNoise:
    weight = int(micro_batches) - 1
    trace = max(0.0, (own - whole) / weight)  # rounding alone can make it negative
    return WindowNoise(trace, (whole - trace) / count, weight)


def _world_size() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1

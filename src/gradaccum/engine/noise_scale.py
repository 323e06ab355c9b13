"""The gradient noise scale, from the micro-batch gradients that accumulation computes anyway.

Source: McCandlish et al. 2018, An Empirical Model of Large-Batch Training, arXiv 1812.06162, appendix A.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, distributed, nn

from gradaccum.engine.gradients import HALF
from gradaccum.engine.noise_estimate import NoiseScaleEstimate, WindowNoise, estimate, in_parts
from gradaccum.engine.observer import Note
from gradaccum.errors import BatchError


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
        with ExitStack() as hooks:
            for number, each in enumerate(parameters):
                if each.requires_grad:
                    hook = each.register_hook(partial(self._squares.note, number))  # type: ignore[no-untyped-call]
                    hooks.callback(hook.remove)
            yield self._squares.end_micro_batch

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
        return [_from_sums(row) for row in seen.tolist() if row[1] >= 2 and all(map(math.isfinite, row))]

    def estimate(self, *, confidence: float = 0.95) -> NoiseScaleEstimate:
        """The noise scale over all windows so far, taken as one stretch in which it stays about the same.

        Raises:
            BatchError: no window had two micro-batches with targets.
            ConfigError: `confidence` is no share.
        """
        return estimate(self.windows(), confidence=confidence)

    def along(self, parts: int, *, confidence: float = 0.95) -> list[NoiseScaleEstimate]:
        """The noise scale in each of so many parts of the windows so far, in order: it drifts along training.

        Raises:
            BatchError: there are fewer windows than parts.
        """
        return [estimate(part, confidence=confidence) for part in in_parts(self.windows(), parts)]


class _Squares:
    """Norms of one window's micro-batch gradients, parameter by parameter, left on their device."""

    def __init__(self) -> None:
        self.micro_batches = 0
        self._fresh: dict[int, Tensor] = {}
        self._norms: list[Tensor] = []
        self._weights: list[float] = []

    def note(self, parameter: int, gradient: Tensor) -> None:
        """The last gradient of a micro-batch counts: a loss that holds gradients itself (a penalty) makes others."""
        widened = torch.float32 if gradient.dtype in HALF else None
        self._fresh[parameter] = torch.linalg.vector_norm(gradient.detach(), dtype=widened)

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


def _from_sums(row: Sequence[float]) -> WindowNoise:
    own, micro_batches, whole, count = row
    weight = int(micro_batches) - 1
    trace = max(0.0, (own - whole) / weight)  # rounding alone can make it negative
    return WindowNoise(trace, (whole - trace) / count, weight)


def _world_size() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1

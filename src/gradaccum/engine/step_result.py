"""What one window did, and what its backward passes left behind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one window did. Over several ranks, loss, gradient norm, count and samples are the same on each.

    Attributes:
        loss: mean loss over all targets of the window and all ranks, a detached scalar; NaN where there was no target.
        grad_norm: global L2 norm of the window's gradient before clipping, a detached scalar; not finite where the
            gradient overflowed.
        count: targets (or the sum of their weights) on all ranks; those of the first term where the objective has
            several.
        samples: samples in the window's micro-batches, on all ranks.
        micro_batches: micro-batches of this rank's window.
        sync_calls: backward passes that this rank ran with gradient sync enabled.
        reductions: gradient collectives that this rank issued: DDP's buckets, or FSDP2's reduce-scatters and, where
            shards have replicas, all-reduces; 0 on one process.
        reduced_bytes: bytes of gradients that went into them.
        gathered_bytes: bytes of whole parameters that FSDP2 gathered for the window.
        applied: whether the optimizer stepped.
        terms: mean of each named term, before its weight; empty where the objective names none.
        skip_reason: why the optimizer did not step, in words; empty where it did.
    """

    loss: Tensor
    grad_norm: Tensor
    count: float
    samples: int
    micro_batches: int
    sync_calls: int
    reductions: int
    reduced_bytes: int
    gathered_bytes: int
    applied: bool
    terms: Mapping[str, Tensor]
    skip_reason: str


@dataclass(slots=True)
class LossSums:
    """Detached loss sums of a window, and the counts that divide them.

    Attributes:
        losses: the terms of each micro-batch in turn.
        counts: targets, `[term][micro-batch]`.
        totals: targets of the whole window, `[term]`.
    """

    losses: list[Tensor]
    counts: Sequence[Sequence[float]]
    totals: Sequence[float]

    def means(self) -> list[Tensor]:
        """Mean of each term over its targets; NaN where it had none."""
        return [self._mean(term, total) for term, total in enumerate(self.totals)]

    def _mean(self, term: int, total: float) -> Tensor:
        if not total:
            return torch.tensor(math.nan)
        losses = self._of(term)
        if losses and losses[0].is_cpu:  # where reading a number waits for nothing, and costs less than a kernel
            return losses[0].new_full((), math.fsum(map(Tensor.item, losses)) / total)
        return self.sum(term) / total

    def _of(self, term: int) -> list[Tensor]:
        """Loss sums of one term, without those of no target, which may be NaN."""
        losses = self.losses[term :: len(self.totals)]
        return losses if all(self.counts[term]) else list(compress(losses, self.counts[term]))

    def sum(self, term: int) -> Tensor:
        """Loss sum of one term; 0 where no micro-batch has a target of it."""
        losses = self._of(term)
        if not losses:
            return torch.zeros(())
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def weighted(self, means: Sequence[Tensor], weights: Iterable[float]) -> Tensor:
        """The window's loss: its terms by their weights, without those that had no target; NaN where none had."""
        parts = zip(means, weights, self.totals, strict=True)
        present = [mean * weight for mean, weight, total in parts if total]
        return torch.stack(present).sum() if present else torch.tensor(math.nan)

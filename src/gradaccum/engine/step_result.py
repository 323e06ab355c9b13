"""What one window did, and what its backward passes left behind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradaccum.engine.gradients import number


class StepResult(NamedTuple):
    """What one window did. Over several ranks, loss, gradient norm, count and samples are the same on each.

    Attributes:
        loss: mean loss over all targets of the window and all ranks, a detached scalar; NaN where there was no target.
        grad_norm: global L2 norm of the window's gradient before clipping, a detached scalar; not finite where the
            gradient overflowed.
        count: targets (or the sum of their weights) on all ranks; those of the first term where the objective has
            several.
        samples: samples in the window's micro-batches (dim 0 of the first tensor of each), on all ranks.
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
    count: float  # type: ignore[assignment]  # of targets, in place of the tuple's method
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
    """Detached loss sums of a window, and the targets that divide them.

    Attributes:
        losses: the terms of each micro-batch in turn, 0 for one that has no target there.
        totals: targets of the whole window, `[term]`.
    """

    losses: list[Tensor]
    totals: Sequence[float]

    def means(self) -> list[Tensor]:
        """Mean of each term over its targets; NaN where it had none."""
        if len(self.totals) == 1:  # the usual case, in which a small window would notice a list's slice
            return [_mean(self.losses, self.totals[0])]
        return [_mean(self._of(term), total) for term, total in enumerate(self.totals)]

    def _of(self, term: int) -> list[Tensor]:
        return self.losses[term :: len(self.totals)]

    def sum(self, term: int) -> Tensor:
        """Loss sum of one term."""
        return _sum(self._of(term))

    def weighted(self, means: Sequence[Tensor], weights: Iterable[float]) -> Tensor:
        """The window's loss: its terms by their weights, without those that had no target; NaN where none had."""
        parts = zip(means, weights, self.totals, strict=True)
        present = [mean * weight for mean, weight, total in parts if total]
        return torch.stack(present).sum() if present else torch.tensor(math.nan)


def _mean(losses: list[Tensor], total: float) -> Tensor:
    if not total:
        return torch.tensor(math.nan)
    if losses[0].is_cpu:  # where reading a number waits for nothing, and costs less than a kernel
        return number(sum(map(Tensor.item, losses)) / total, losses[0])
    return _sum(losses) / total


def _sum(losses: list[Tensor]) -> Tensor:
    if not losses:
        return torch.zeros(())
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

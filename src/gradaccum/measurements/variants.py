"""How people accumulate gradients: the engine, and the usual mistakes, each as the plain loop that makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from gradaccum.engine.accumulator import Accumulator
from gradaccum.engine.batching import Batch
from gradaccum.engine.objective import Objective
from gradaccum.engine.step_result import LossSums
from gradaccum.measurements.comparison import TrainingStep

Window = Sequence[Batch]


class Loop(Protocol):
    """Takes one window; returns the mean loss over its targets."""

    def __call__(
        self, model: nn.Module, optimizer: Optimizer, window: Window, *, objective: Objective, clip_norm: float | None
    ) -> Tensor: ...


def scaled(
    model: nn.Module, optimizer: Optimizer, window: Window, *, objective: Objective, clip_norm: float | None
) -> Tensor:
    """The engine: every micro-batch's loss sum divided by the targets of the whole window."""
    return Accumulator(model, optimizer, objective, clip_norm=clip_norm).step(window).loss


def naive(
    model: nn.Module, optimizer: Optimizer, window: Window, *, objective: Objective, clip_norm: float | None
) -> Tensor:
    """No division: N micro-batch means add up to N times the gradient."""
    losses = Losses(objective)
    optimizer.zero_grad()
    for batch in window:
        losses.mean(model, batch).backward()  # type: ignore[no-untyped-call]
    clip(model, clip_norm)
    optimizer.step()
    return losses.over_targets()


def mean_of_means(
    model: nn.Module, optimizer: Optimizer, window: Window, *, objective: Objective, clip_norm: float | None
) -> Tensor:
    """Every micro-batch's mean weighs the same, however few targets it has."""
    losses = Losses(objective)
    optimizer.zero_grad()
    for batch in window:
        (losses.mean(model, batch) / len(window)).backward()  # type: ignore[no-untyped-call]
    clip(model, clip_norm)
    optimizer.step()
    return losses.over_targets()


def step_every_micro(
    model: nn.Module, optimizer: Optimizer, window: Window, *, objective: Objective, clip_norm: float | None
) -> Tensor:
    """The optimizer steps inside the window: N noisy steps where one was meant."""
    losses = Losses(objective)
    for batch in window:
        optimizer.zero_grad()
        (losses.mean(model, batch) / len(window)).backward()  # type: ignore[no-untyped-call]
        clip(model, clip_norm)
        optimizer.step()
    return losses.over_targets()


def clip_every_micro(
    model: nn.Module, optimizer: Optimizer, window: Window, *, objective: Objective, clip_norm: float | None
) -> Tensor:
    """Divided rightly, but what has been accumulated is clipped after each micro-batch."""
    losses = Losses(objective)
    totals = objective.totals(window)
    optimizer.zero_grad()
    for batch in window:
        losses.divided(model, batch, totals).backward()  # type: ignore[no-untyped-call]
        clip(model, clip_norm)
    optimizer.step()
    return losses.over_targets()


class Losses:
    """Computes a loop's losses and remembers them, so that all loops report the same mean."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.sums: list[Tensor] = []
        self.counts: list[Sequence[float]] = []

    def divided(self, model: nn.Module, batch: Batch, totals: Sequence[float]) -> Tensor:
        """The loss sum of each term over its total, by its weight; without targets 0, as the engine has it."""
        sums = self.objective.loss_sums(model, batch)
        counts = self.objective.totals([batch])
        self.sums += [loss.detach() if count else loss.new_zeros(()) for loss, count in zip(sums, counts, strict=True)]
        self.counts.append(counts)
        weights = self.objective.terms.values()
        parts = [loss * (weight / total) for loss, weight, total in zip(sums, weights, totals, strict=True) if total]
        return torch.stack(parts).sum() if parts else torch.zeros((), requires_grad=True)

    def mean(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.divided(model, batch, self.objective.totals([batch]))

    def over_targets(self) -> Tensor:
        sums = LossSums(self.sums, [sum(of_term) for of_term in zip(*self.counts, strict=True)])
        return sums.weighted(sums.means(), self.objective.terms.values())


def clip(model: nn.Module, clip_norm: float | None) -> None:
    if clip_norm is not None:
        clip_grad_norm_(model.parameters(), clip_norm)


@dataclass(frozen=True)
class Variant:
    """One way to accumulate.

    Attributes:
        loop: the code.
        clipped: whether it clips the gradient; the others never do.
        ragged: whether it is shown on micro-batches of unequal sizes, without which its mistake hides.
        one_gradient: whether a window has a single gradient.
    """

    loop: Loop
    clipped: bool = False
    ragged: bool = False
    one_gradient: bool = True

    def step(self, objective: Objective, clip_norm: float) -> TrainingStep:
        return partial(self.loop, objective=objective, clip_norm=clip_norm if self.clipped else None)


VARIANTS = {
    "scaled": Variant(scaled),
    "naive": Variant(naive),
    "mean_of_means": Variant(mean_of_means, ragged=True),
    "step_every_micro": Variant(step_every_micro, one_gradient=False),
    "scaled_clipped": Variant(scaled, clipped=True),
    "naive_clipped": Variant(naive, clipped=True),
    "clip_every_micro": Variant(clip_every_micro, clipped=True),
    "scaled_ragged": Variant(scaled, ragged=True),
}

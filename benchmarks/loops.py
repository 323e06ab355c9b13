"""Training loops to time and to audit: the bare one, and this package's engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from gradaccum import Accumulator, Objective

Window = Sequence[tuple[Tensor, Tensor]]
Run = Callable[[Sequence[Window]], float | None]
"""Trains on windows; returns the CPU seconds of its training alone where its start-up is not part of that."""

Loop = Callable[[nn.Module, Optimizer, int], Run]
"""`(model, optimizer, accum_steps)` to what trains on windows of that many micro-batches, the last perhaps of fewer."""


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy as everybody writes it: the mean over the micro-batch."""
    inputs, labels = batch
    logits = model(inputs)
    return (
        F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        if logits.dim() > 2
        else F.cross_entropy(logits, labels)
    )


def bare(model: nn.Module, optimizer: Optimizer, accum_steps: int) -> Run:
    """The loop of every tutorial; it tracks neither loss nor gradient norm."""

    def run(windows: Sequence[Window]) -> None:
        for window in windows:
            for batch in window:
                (mean_loss(model, batch) / accum_steps).backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def engine(model: nn.Module, optimizer: Optimizer, accum_steps: int) -> Run:
    """gradaccum.Accumulator, which tracks loss and gradient norm."""
    del accum_steps
    accumulator = Accumulator(model, optimizer, Objective.classification())

    def run(windows: Sequence[Window]) -> None:
        for window in windows:
            accumulator.step(window)

    return run

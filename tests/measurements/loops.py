"""What is diagnosed in tests: a small network, a batch, and loops written by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from gradaccum import Objective, diagnose
from gradaccum.measurements.diagnose import Diagnosis
from gradaccum.measurements.model_causes import Cause

FEATURES, CLASSES, SAMPLES = 6, 4, 12
UNEVEN, EVEN = (7, 3, 2), (4, 4, 4)
CLASSIFICATION = Objective.classification()

Window = Sequence[tuple[Tensor, Tensor]]
Step = Callable[[nn.Module, Optimizer, Window], Any]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(SAMPLES, FEATURES, generator=generator),
        torch.randint(CLASSES, (SAMPLES,), generator=generator),
    )


def network(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), *middle, nn.GELU(), nn.Linear(8, CLASSES))


def run(
    *middle: Callable[[], nn.Module],
    cuts: Sequence[Sequence[int]] = (EVEN, UNEVEN),
    step: Step | None = None,
    data: Any = None,
) -> Diagnosis:
    return diagnose(
        lambda: network(*(make() for make in middle)), CLASSIFICATION, data or batch(), cuts=cuts, step=step
    )


def the_cause(found: Diagnosis, kind: str) -> Cause:
    (cause,) = [cause for cause in found.causes if cause.kind == kind]
    return cause


def loop(weigh: Callable[[Tensor, int, int], Tensor], *, clear_each: bool = False, step_each: bool = False) -> Step:
    """A hand-written loop: `weigh(mean loss, samples, micro-batches)` is what it differentiates."""

    def step(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
        optimizer.zero_grad()
        for inputs, labels in window:
            if clear_each:
                optimizer.zero_grad()
            weigh(F.cross_entropy(model(inputs), labels), len(labels), len(window)).backward()
            if step_each:
                optimizer.step()
        if not step_each:
            optimizer.step()

    return step

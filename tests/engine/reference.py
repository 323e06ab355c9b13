"""Plain float64 computations that the engine is compared with: one batch, one backward, no engine."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradaccum import Accumulator, Objective, split
from gradaccum.engine import gradients

FEATURES, CLASSES = 6, 4
UNEVEN_CUTS = [[12], [1] * 12, [6, 6], [5, 4, 3], [1, 11], [11, 1], [2, 7, 1, 2]]


def make_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """A smooth network, the same one each time."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.GELU(), nn.Linear(5, CLASSES)).to(dtype)


def make_batch(samples: int = 12, dtype: torch.dtype = torch.float64, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(CLASSES, (samples,), generator=generator)


def window_of(cut: Sequence[int], dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    return split(make_batch(sum(cut), dtype), cut)


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor], weight: Tensor | None = None) -> Tensor:
    """torch's own mean cross-entropy over the whole batch."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, weight=weight)


def gradient_of(loss: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def both_gradients(
    model: nn.Module, objective: Objective, batch: Any, *, cut: Sequence[int] = (5, 4, 3), windows: int = 2
) -> tuple[list[Tensor], list[Tensor]]:
    """What the engine leaves in `.grad` in the last of some windows over a cut batch, and one plain pass over it all.

    A parameter without a gradient counts as zeros.
    """
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), objective)
    for _ in range(windows):
        plain = copy.deepcopy(model)
        plain.zero_grad()
        (objective.loss_sum(plain, batch) / float(objective.count(batch))).backward()
        accumulator.step(split(batch, cut))
    found, expected = (
        [torch.zeros_like(each) if each.grad is None else each.grad for each in one.parameters()]
        for one in (model, plain)
    )
    return found, expected


def accumulated(model: nn.Module) -> list[Tensor]:
    """What the engine left in `.grad`."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor], *, rtol: float = 1e-12) -> None:
    assert len(actual) == len(expected)
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left.double(), right.double(), rtol=rtol, atol=rtol)


def relative_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Of the whole gradient, in the L2 norm."""
    difference = gradients.global_norm([a.double() - b.double() for a, b in zip(actual, expected, strict=True)])
    return float(difference / gradients.global_norm(expected))


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def snapshot(*parts: object) -> list[object]:
    """State of models, optimizers and schedulers, to compare before and after."""
    return [copy.deepcopy(part.state_dict()) for part in parts if part is not None]  # type: ignore[attr-defined]


def same_state(left: object, right: object) -> bool:
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        return (
            isinstance(right, dict)
            and left.keys() == right.keys()
            and all(same_state(value, right[key]) for key, value in left.items())
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same_state, left, right))  # type: ignore[arg-type]
    return left == right


CLASSIFICATION = Objective.classification()

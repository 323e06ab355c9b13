"""Plain float64 computations that the engine is compared with: one batch, one backward, no engine."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradaccum import Objective, split

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


def accumulated(model: nn.Module) -> list[Tensor]:
    """What the engine left in `.grad`."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor], *, rtol: float = 1e-12) -> None:
    assert len(actual) == len(expected)
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left.double(), right.double(), rtol=rtol, atol=rtol)


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

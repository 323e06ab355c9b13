"""Which mistake a training loop makes, told from the gradient that it gives its optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradaccum.engine.batching import Batch, batch_size
from gradaccum.engine.objective import Objective
from gradaccum.measurements.comparison import MATCH, Trace, same


@dataclass(frozen=True)
class Parts:
    """Every micro-batch's own gradient in float64, flat: `[micro-batches, parameters]`.

    Attributes:
        shares: of its part of the window's loss; they add up to the right gradient.
        means: of its own mean loss; zero where it has no targets.
        counts: its targets, over all terms.
        samples: its samples.
    """

    shares: Tensor
    means: Tensor
    counts: tuple[float, ...]
    samples: tuple[int, ...]

    @classmethod
    def of(cls, model: nn.Module, objective: Objective, window: Sequence[Batch]) -> Parts:
        totals = objective.totals(window)
        own = [objective.totals([batch]) for batch in window]
        return cls(
            torch.stack([flat_gradient(model, objective.share(model, batch, totals)) for batch in window]),
            torch.stack(
                [
                    flat_gradient(model, objective.share(model, batch, counts))
                    for batch, counts in zip(window, own, strict=True)
                ]
            ),
            tuple(sum(counts) for counts in own),
            tuple(map(batch_size, window)),
        )


def name_the_mistake(
    trace: Trace, make_model: Callable[[], nn.Module], objective: Objective, *, window: Sequence[Batch]
) -> str:
    """What the loop did instead of right accumulation, in words; empty where it accumulated rightly.

    It is compared with sums of the micro-batches' own gradients, so that a model or an objective that cannot be cut is
    not held against the loop.
    """
    if trace.optimizer_steps != 1:
        return f"the optimizer stepped {trace.optimizer_steps} times in one window, not once"
    model = make_model()
    parts = Parts.of(model, objective, window)
    found = torch.cat(
        [trace.gradients.get(name, torch.zeros_like(each)).flatten() for name, each in model.named_parameters()]
    )
    if not found.isfinite().all():
        masked = "; a micro-batch without targets, whose mean is 0/0, does that" if 0.0 in parts.counts else ""
        return f"the gradient is not finite{masked}"
    for candidate, what in _candidates(parts):
        if same(found, candidate):
            return (
                what and f"{what}; the gradient's norm is {_ratio(found, parts.shares.sum(0)):.4g} times the right one"
            )
    return _scaled(found, parts)


def _candidates(parts: Parts) -> Iterator[tuple[Tensor, str]]:
    """Gradients that loops are known to make; the right one comes first, and the first that matches is named."""
    steps, counts = len(parts.counts), [f"{count:g}" for count in parts.counts]
    right, undivided = parts.shares.sum(0), parts.means.sum(0)
    yield right, ""
    yield undivided, f"the loss is not divided by the {steps} accumulation steps"
    yield right * steps, f"the loss is not divided by the {steps} accumulation steps"
    yield undivided / steps, f"a mean of means: every micro-batch weighs the same, with {', '.join(counts)} targets"
    by_samples = torch.tensor(parts.samples, dtype=torch.float64) / sum(parts.samples)
    weights = f"its {', '.join(map(str, parts.samples))} samples, not by its {', '.join(counts)} targets"
    yield by_samples @ parts.means, f"every micro-batch weighs by {weights}"
    yield right / steps, f"the loss is divided twice by the {steps} accumulation steps"
    yield undivided / steps**2, f"the loss is divided twice by the {steps} accumulation steps"
    yield right * sum(parts.counts), "the loss sum is not divided by the targets"
    for which, index in (("last", -1), ("first", 0)):
        for part in (parts.shares[index], parts.means[index], parts.means[index] / steps):
            yield part, f"only the {which} micro-batch's gradient reaches the optimizer"


def _scaled(found: Tensor, parts: Parts) -> str:
    """A factor that no known mistake explains, or another direction altogether."""
    right, mean_of_means = parts.shares.sum(0), parts.means.mean(0)
    for direction, what in ((right, "the right gradient"), (mean_of_means, "a mean of means")):
        factor = float(found @ direction / (direction @ direction))
        if same(found, direction * factor):
            return f"the gradient is {factor:.4g} times {what}{_hint(factor, len(parts.counts))}"
    cosine = float(torch.nn.functional.cosine_similarity(found, right, dim=0))
    return f"the gradient points elsewhere: cosine {cosine:.4f}, norm {_ratio(found, right):.4g} times the right one"


def _hint(factor: float, steps: int) -> str:
    """A loop set to a number of accumulation steps divides a shorter window by it too."""
    divisor = steps / factor if factor > 0 else 0.0
    if divisor > 1 and abs(divisor - round(divisor)) < MATCH * divisor:
        return f": divided by {divisor:.0f}, perhaps, where the window has {steps} micro-batches"
    return " (a clip, perhaps)" if 0 < factor < 1 else ""


def flat_gradient(model: nn.Module, loss: Tensor) -> Tensor:
    """Of every parameter in turn, zeros where there is none."""
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    found = dict(zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True))
    return torch.cat([_or_zeros(found.get(parameter), parameter).flatten() for parameter in parameters])


def _or_zeros(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if gradient is None else gradient


def _ratio(found: Tensor, right: Tensor) -> float:
    size = float(right.norm())
    return float(found.norm()) / size if size else math.inf

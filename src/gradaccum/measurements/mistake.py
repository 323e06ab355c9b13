"""Which mistake a training loop makes, told from the gradient that it gives its optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradaccum.engine.batching import Batch, batch_size
from gradaccum.engine.objective import Objective
from gradaccum.measurements.comparison import Named, Trace, norm, same
from gradaccum.measurements.verdict import UPDATE, VISIBLE_UPDATE


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
    def of(cls, model: nn.Module, objective: Objective, make_window: Callable[[], Sequence[Batch]]) -> Parts:
        """A pass may change its batch, so that each kind of part is made of a window of its own."""
        window = make_window()
        totals, own = objective.totals(window), [objective.totals([batch]) for batch in window]
        samples = tuple(map(batch_size, window))

        def gradients(divisors: Sequence[Sequence[float]]) -> Tensor:
            shares = zip(make_window(), divisors, strict=True)
            return torch.stack([flat_gradient(model, objective.share(model, *share)) for share in shares])

        return cls(gradients([totals] * len(window)), gradients(own), tuple(map(sum, own)), samples)

    @property
    def right(self) -> Tensor:
        """What a loop should sum, flat."""
        return self.shares.sum(0)


def name_the_mistake(found: Tensor, parts: Parts, *, match: float) -> str:
    """What the loop did instead of right accumulation, in words; empty where it accumulated rightly.

    It is compared with sums of the micro-batches' own gradients, so that a model or an objective that cannot be cut is
    not held against the loop.
    """
    if not found.isfinite().all():
        masked = "; a micro-batch without targets, whose mean is 0/0, does that" if 0.0 in parts.counts else ""
        return f"the gradient is not finite{masked}"
    for candidate, what in _candidates(parts):
        if same(found, candidate, match):
            return what and f"{what}; the gradient's norm is {_ratio(found, parts.right):.4g} times the right one"
    return _scaled(found, parts, match)


def _candidates(parts: Parts) -> Iterator[tuple[Tensor, str]]:
    """Gradients that loops are known to make; the right one comes first, and the first that matches is named."""
    steps, counts = len(parts.counts), [f"{count:g}" for count in parts.counts]
    right, undivided = parts.right, parts.means.sum(0)
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


def _scaled(found: Tensor, parts: Parts, match: float) -> str:
    """A factor that no known mistake explains, or another direction altogether."""
    right, mean_of_means = parts.right, parts.means.mean(0)
    for direction, what in ((right, "the right gradient"), (mean_of_means, "a mean of means")):
        factor = float(found @ direction / (direction @ direction))
        if same(found, direction * factor, match):
            return f"the gradient is {factor:.4g} times {what}{_hint(factor, len(parts.counts), match)}"
    cosine = float(torch.nn.functional.cosine_similarity(found, right, dim=0))
    return f"the gradient points elsewhere: cosine {cosine:.4f}, norm {_ratio(found, right):.4g} times the right one"


def _hint(factor: float, steps: int, match: float) -> str:
    """A loop set to a number of accumulation steps divides a shorter window by it too."""
    divisor = steps / factor if factor > 0 else 0.0
    if divisor > 1 and abs(divisor - round(divisor)) < match * divisor:
        return f": divided by {divisor:.0f}, perhaps, where the window has {steps} micro-batches"
    return " (a clip, perhaps)" if 0 < factor < 1 else ""


def name_the_other_update(trace: Trace, found: Tensor, *, given: float, expected: float) -> str:
    """What the loop does to the parameters beside one plain step along the gradient; empty where nothing.

    Args:
        trace: of the loop, with SGD from its first step on.
        found: the gradient that its optimizer found, flat.
        given: the learning rate of the loop's optimizer.
        expected: the one that it should step with.
    """
    step = expected * float(found.norm())
    moved = {name: update + expected * trace.gradients.get(name, ZERO) for name, update in trace.update.items()}
    if norm(moved) <= UPDATE * (step + VISIBLE_UPDATE * norm(trace.parameters)):
        return ""
    if set(trace.rates) != {expected}:
        rates = ", ".join(f"{rate:.4g}" for rate in dict.fromkeys(trace.rates))
        return f"the optimizer steps with a learning rate of {rates}, where the loop was given {given:.4g}"
    if not norm(trace.update):
        return "the parameters end where they began, although the optimizer steps"
    return (
        "the loop changes the parameters beside the optimizer's one step: they move "
        f"{norm(trace.update) / step:.4g} times as far as that takes them"
    )


ZERO = torch.zeros((), dtype=torch.float64)


def flat_in_order(model: nn.Module, named: Named) -> Tensor:
    """Of every parameter in the model's order, zeros where there is none."""
    return torch.cat([named.get(name, torch.zeros_like(each)).flatten() for name, each in model.named_parameters()])


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

"""What a loop does beside summing one window's gradient: clips it, leaves it for the next window, forgets train()."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradaccum.engine.batching import Batch
from gradaccum.measurements.bench import make_optimizer
from gradaccum.measurements.comparison import before_step, full_batch_step, same
from gradaccum.measurements.mistake import flat_gradient
from gradaccum.measurements.setup import SGD

if TYPE_CHECKING:
    from gradaccum.measurements.subject import Step, Subject

SETTINGS = SGD(lr=0.01, momentum=0.9)
"""What every loop is diagnosed with."""

NEARLY = 1e-5
"""In float64, relative, where an epsilon in a user's clip may play a part: torch's own adds 1e-6 to the norm."""


@dataclass
class Seen:
    """One window, in float64.

    Attributes:
        brought: the sum of what its backward passes brought, flat.
        found: the gradient as its first optimizer step found it, flat; None where there was no step.
        training: whether the model was in training mode in each of its forward passes.
        state: the model's, before the window.
    """

    brought: Tensor
    state: Mapping[str, Tensor]
    found: Tensor | None = None
    training: list[bool] = field(default_factory=list)


def watch(subject: Subject, step: Step, windows: Sequence[Sequence[Batch]]) -> list[Seen]:
    """Let a loop take one window after another on a new model, and look at each."""
    model = subject.model()
    optimizer = make_optimizer(model, SETTINGS)
    parameters = list(model.parameters())
    seen: list[Seen] = []
    hooks = list(_hooks(model, optimizer, seen))
    with torch.random.fork_rng():
        torch.manual_seed(subject.seed)
        for window in windows:
            nothing = torch.zeros(sum(each.numel() for each in parameters), dtype=torch.float64)
            seen.append(Seen(nothing, deepcopy(model.state_dict())))
            step(model, optimizer, window)
    for hook in hooks:
        hook.remove()
    return seen


def _hooks(model: nn.Module, optimizer: Optimizer, seen: list[Seen]) -> Iterator[Any]:
    parameters = list(model.parameters())
    end = 0
    for parameter in parameters:
        start, end = end, end + parameter.numel()
        if parameter.requires_grad:

            def bring(gradient: Tensor, part: slice = slice(start, end)) -> None:
                seen[-1].brought[part] += gradient.detach().flatten()

            yield parameter.register_hook(bring)  # type: ignore[no-untyped-call]

    def find() -> None:
        if seen[-1].found is None:
            grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
            seen[-1].found = torch.cat([each.detach().flatten() for each in grads])

    yield optimizer.register_step_pre_hook(partial(before_step, find))
    yield model.register_forward_pre_hook(lambda module, _: seen[-1].training.append(module.training))


def clip_norm_of(subject: Subject, cut: Sequence[int]) -> float | None:
    """The norm that a loop clips a right gradient to; None where it does not clip, or sums a wrong one.

    A clip shows in two things: what reaches the optimizer is a part of what the backward passes brought, and has the
    same norm for another window, whose gradient has another.
    """
    whole, window = subject.window([sum(cut)], torch.float64), subject.window(cut, torch.float64)
    right = watch(subject, full_batch_step(subject.objective), [whole])[0].brought
    seen = watch(subject, subject.step, [window])[0]
    if seen.found is None or not same(seen.brought, right) or same(seen.found, right):
        return None
    size, norm = float(seen.found.norm()), float(right.norm())
    if not 0 < size < norm or not same(seen.found, right * (size / norm)):
        return None
    alone = [watch(subject, subject.step, [[piece]])[0] for piece in window]
    clips = any(
        each.found is not None
        and abs(float(each.found.norm()) - size) < NEARLY * size
        and abs(float(each.brought.norm()) - norm) > 100 * NEARLY * norm
        for each in alone
    )
    return size * (norm + 1e-6) / norm if clips else None  # torch's clip adds 1e-6 to the norm


def next_window_differs(subject: Subject, cut: Sequence[int], clip_norm: float | None) -> str:
    """How a second window's gradient differs from the full batch's, in words; empty where it does not.

    The full batch's is taken where the loop left the model, so that what it does to learning rates or weights between
    windows is its own affair.
    """
    window, (whole,) = subject.window(cut, torch.float64), subject.window([sum(cut)], torch.float64)
    first, second = watch(subject, subject.step, [window, window])
    if second.found is None:
        return "the optimizer steps in the first window, and not in the next"
    model = subject.model()
    model.load_state_dict(second.state)
    expected = flat_gradient(model, subject.objective.share(model, whole, subject.objective.totals([whole])))
    if clip_norm is not None:
        expected *= min(1.0, clip_norm / (float(expected.norm()) + 1e-6))
    if same(second.found, expected, NEARLY):
        return ""
    if first.found is not None and same(second.found, first.found + second.brought, NEARLY):
        return "the next window's gradient also holds this one's: gradients are not cleared between windows"
    return "the next window's gradient is another than the full batch's: the loop keeps something from this one"


def runs_in_evaluation_mode(subject: Subject, cut: Sequence[int]) -> bool:
    """Whether the loop runs the model in evaluation mode."""
    return False in watch(subject, subject.step, [subject.window(cut, torch.float64)])[0].training

"""Watching a loop: what its backward passes bring, what its optimizer finds, and in which mode its model runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from gradaccum.engine.batching import Batch
from gradaccum.measurements.bench import make_optimizer
from gradaccum.measurements.comparison import before_step, dense, same
from gradaccum.measurements.randomness import mode_asked_for
from gradaccum.measurements.setup import SGD

if TYPE_CHECKING:
    from gradaccum.measurements.subject import Subject

SETTINGS = SGD(lr=0.01, momentum=0.9)
"""What every loop is diagnosed with."""

NEARLY = 1e-5
"""Relative, where an epsilon in a user's clip may play a part: torch's own adds 1e-6 to the norm."""


@dataclass
class Seen:
    """One window, in float64.

    Attributes:
        brought: the sum of what its backward passes brought, flat.
        state: the model's, before the window.
        found: the gradient as its first optimizer step found it, flat; None where there was no step.
        training: whether the model was to be in training mode in each of the forward passes that gradients come from.
        momentum: the optimizer's buffers after the window, flat; zeros where there are none.
        resting: batch norms that ran in evaluation mode in a pass of a model in training mode.
        autocast: the type that layers computed in instead of the model's own; None where they did not.
    """

    brought: Tensor
    state: Mapping[str, Tensor]
    found: Tensor | None = None
    training: list[bool] = field(default_factory=list)
    momentum: Tensor | None = None
    resting: set[str] = field(default_factory=set)
    autocast: torch.dtype | None = None


def watch(
    subject: Subject, windows: Iterable[Sequence[Batch]], *, factor: float = 1.0, dtype: torch.dtype = torch.float64
) -> list[Seen]:
    """Let the loop take one window after another on a new model, and look at each.

    Args:
        subject: the loop, and what it trains.
        windows: read one at a time, so that each may be made when the one before is done with.
        factor: every gradient that a backward pass brings is multiplied by it.
        dtype: of the model.
    """
    model = subject.bench().model(dtype)
    optimizer = make_optimizer(model, SETTINGS, fused=False)
    seen: list[Seen] = []
    hooks = list(_hooks(model, optimizer, seen, factor=factor))
    with torch.random.fork_rng():
        torch.manual_seed(subject.seed)
        for window in windows:
            seen.append(Seen(flat_over(model, {}), deepcopy(model.state_dict())))
            subject.step(model, optimizer, window)
            state = {each: optimizer.state.get(each, {}).get("momentum_buffer") for each in model.parameters()}
            seen[-1].momentum = flat_over(model, state)
    for hook in hooks:
        hook.remove()
    return seen


def flat_over(model: nn.Module, of_parameter: Mapping[Any, Tensor | None]) -> Tensor:
    """Of every parameter in turn, in float64; zeros where there is none."""
    found = ((each, of_parameter.get(each)) for each in model.parameters())
    parts = [torch.zeros_like(each) if value is None else dense(value) for each, value in found]
    return torch.cat([part.detach().flatten().double() for part in parts])


def _hooks(model: nn.Module, optimizer: Optimizer, seen: list[Seen], *, factor: float) -> Iterator[Any]:
    end = 0
    for parameter in model.parameters():
        start, end = end, end + parameter.numel()
        if parameter.requires_grad:
            bring = partial(_bring, seen, part=slice(start, end), factor=factor)
            yield parameter.register_hook(bring)  # type: ignore[no-untyped-call]

    def find() -> None:
        if seen[-1].found is None:
            seen[-1].found = flat_over(model, {each: each.grad for each in model.parameters()})

    yield optimizer.register_step_pre_hook(partial(before_step, find))
    yield model.register_forward_pre_hook(partial(_note_mode, seen))
    for name, module in model.named_modules():
        yield module.register_forward_pre_hook(partial(_note_autocast, seen))
        if isinstance(module, _BatchNorm):
            yield module.register_forward_pre_hook(partial(_note_rest, seen, model=model, name=name))


def _bring(seen: list[Seen], gradient: Tensor, *, part: slice, factor: float) -> Tensor | None:
    seen[-1].brought[part] += dense(gradient).detach().flatten()
    return None if factor == 1 else gradient * factor


def _note_mode(seen: list[Seen], model: nn.Module, _: Any) -> None:
    if torch.is_grad_enabled():  # else it is a validation, of which nothing is learned
        seen[-1].training.append(mode_asked_for(model))


def _note_rest(seen: list[Seen], norm: nn.Module, _: Any, *, model: nn.Module, name: str) -> None:
    if torch.is_grad_enabled() and mode_asked_for(model) and not norm.training:
        seen[-1].resting.add(name)


def _note_autocast(seen: list[Seen], *_: Any) -> None:
    if torch.is_autocast_enabled("cpu"):
        seen[-1].autocast = torch.get_autocast_dtype("cpu")


def parallel(one: Tensor, other: Tensor) -> bool:
    """Whether they point in the same direction, nearly."""
    return bool(one.norm()) and bool(other.norm()) and same(one / one.norm(), other / other.norm(), NEARLY)

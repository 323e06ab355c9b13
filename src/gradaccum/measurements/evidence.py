"""What in a model or an objective makes a cut batch differ from the whole: mixing layers, moving state, the loss."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.engine.batching import Batch, batch_size
from gradaccum.engine.objective import Objective
from gradaccum.engine.structure import leaves
from gradaccum.measurements.mistake import flat_gradient
from gradaccum.measurements.randomness import freeze


def with_frozen_batch_norms(model: nn.Module, names: Container[str] | None = None) -> nn.Module:
    """All of them, or those that are named."""
    for name, module in batch_norms(model):
        if names is not None and name not in names:
            continue
        if module.running_mean is None:  # it would go on normalising by its batch
            module.running_mean, module.running_var = torch.zeros(size := module.num_features), torch.ones(size)
            module.to(next(model.parameters()).dtype)
        freeze(module)
    return model


def batch_norms(model: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """Layers that normalise by the statistics of the micro-batch."""
    return (
        (name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training
    )


@dataclass(frozen=True)
class Pieces:
    """A model's passes over a batch, whole and cut.

    Attributes:
        make_model: a new model in float64.
        objective: the loss.
        make: the pieces of a cut, made afresh, since a pass may change its batch.
        match: as close as two right numbers come, relative.
    """

    make_model: Callable[[], nn.Module]
    objective: Objective
    make: Callable[[Sequence[int]], Sequence[Batch]]
    match: float

    def mixing_module(self, cut: Sequence[int]) -> str | None:
        """The first module, in the order of computation, whose output for a sample depends on the other samples."""
        on_whole, on_pieces = (_outputs(self.make_model, self.objective, self.make(each)) for each in ([sum(cut)], cut))
        for name, output in on_whole.items():
            other = on_pieces.get(name)
            if other is not None and other.shape == output.shape and self.differ(output, other):
                return name.rpartition("#")[0]
        return None

    def moving_state(self, cut: Sequence[int]) -> tuple[str, ...]:
        """What a forward pass changes in the model, where that changes the gradient of the next one; else nothing."""
        model = self.make_model()
        gradients, states = [], [_state(model)]
        for _ in range(2):
            (whole,) = self.make([sum(cut)])
            loss = self.objective.share(model, whole, self.objective.totals([whole]))
            gradients.append(flat_gradient(model, loss))
            states.append(_state(model))
        if not self.differ(*gradients):
            return ()
        return tuple(name for name, value in states[0].items() if not _equal(value, states[1][name])) or (HIDDEN,)

    def losses(self, cut: Sequence[int]) -> Tensor:
        """`[pieces, terms]`: the loss sums of every piece."""
        return torch.stack([_losses(self.make_model(), self.objective, piece) for piece in self.make(cut)])

    def are_separable(self, cut: Sequence[int]) -> bool:
        """Whether loss sums and counts of the pieces add up to those of the whole, in every term."""
        added, (whole,) = self.losses(cut).sum(0), self.losses([sum(cut)])
        totals = [
            torch.tensor(self.objective.totals(self.make(each)), dtype=torch.float64) for each in (cut, [sum(cut)])
        ]
        return not any(self.differ(*pair) for pair in zip(added, whole, strict=True)) and not self.differ(*totals)

    def is_a_mean(self, cut: Sequence[int]) -> bool:
        """Whether the loss of the whole is rather the pieces' mean than their sum, in any term."""
        losses, (whole,) = self.losses(cut), self.losses([sum(cut)])
        weights = torch.tensor(cut, dtype=torch.float64) / sum(cut)
        mean, added = weights @ losses, losses.sum(0)
        return bool(((whole - mean).abs() < A_MEAN * (whole - added).abs()).any())

    def has_a_constant(self, cut: Sequence[int]) -> bool:
        """Whether every pass adds the same, whatever its samples: a penalty on the weights, say."""
        samples = sum(cut)
        if samples < 3:
            return False
        whole, two, three = (self.losses(each).sum(0) for each in ([samples], [samples - 1, 1], [samples - 2, 1, 1]))
        return self.differ(two, whole) and not self.differ(three - whole, 2 * (two - whole))

    def differ(self, one: Tensor, other: Tensor) -> bool:
        """Relative to the largest entry; numbers that are none differ."""
        one, other = 1.0 * one, 1.0 * other  # truth values and whole numbers know no norm
        size = float(torch.maximum(one.abs().max(), other.abs().max())) if one.numel() else 0.0
        return not float((one - other).abs().max() if one.numel() else 0.0) <= self.match * size


A_MEAN = 0.1
"""A loss ten times as near to the mean of its pieces as to their sum is a mean, up to how it weighs them."""

HIDDEN = "something that the model keeps (no buffer, and no number among its layers' attributes)"


def _state(model: nn.Module) -> dict[str, Any]:
    """Buffers, and plain numbers that layers keep."""
    numbers = {
        f"{name}.{attribute}".removeprefix("."): value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return numbers | {name: buffer.clone() for name, buffer in model.named_buffers()}


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@torch.no_grad()
def _losses(model: nn.Module, objective: Objective, batch: Batch) -> Tensor:
    return torch.stack([loss_sum.double() for loss_sum in objective.loss_sums(model, batch)])


@torch.no_grad()
def _outputs(make_model: Callable[[], nn.Module], objective: Objective, batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Output of every call of every module, `name#call.part`, over all batches in turn, in order of completion."""
    found: dict[str, list[Tensor]] = {}
    for batch in batches:
        calls: dict[str, int] = {}
        samples, model = batch_size(batch), make_model()  # so that no pass sees what another left

        def note(name: str, output: object, *, calls: dict[str, int] = calls, samples: int = samples) -> None:
            calls[name] = calls.get(name, 0) + 1
            for part, each in enumerate(leaves(output)):
                if isinstance(each, Tensor) and each.dim() and len(each) == samples:
                    found.setdefault(f"{name}#{calls[name]}.{part}", []).append(each.detach().clone())

        for name, module in model.named_modules():
            module.register_forward_hook(lambda _, __, output, name=name, note=note: note(name, output))
        objective.loss_sums(model, batch)
    return {key: torch.cat(outputs) for key, outputs in found.items() if len({o.shape[1:] for o in outputs}) == 1}

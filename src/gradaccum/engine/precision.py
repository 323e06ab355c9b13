"""In which number formats a window is computed: autocast, loss scale, wide gradients, master weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradaccum.engine import gradients
from gradaccum.errors import ConfigError

Precision = Literal["float32", "bf16", "fp16"]

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


Computation = TypeVar("Computation", bound=Callable[..., object])


def autocast(precision: Precision, beside: Tensor, compute: Computation) -> Computation:
    """Forward and loss of a micro-batch in a precision, on the device that a tensor is on.

    Backward runs outside, in the types that forward chose.
    """
    if precision == "float32":
        return compute
    narrow: Computation = torch.autocast(beside.device.type, _AUTOCAST[precision])(compute)
    return narrow


def master_weights(model: nn.Module) -> list[nn.Parameter]:
    """A float32 copy of each trainable parameter, for the optimizer of a half-precision model to step on.

    Half-precision parameters lose every update smaller than 1/256 (bf16) of themselves; float32 masters keep them. Give
    the list to the optimizer and to `Accumulator(..., master_weights=...)`, which rounds the masters into the model
    after each step. Load weights into the model before, not after.

    Raises:
        ConfigError: a parameter that float32 cannot hold.
    """
    parameters = trainable(model)
    for parameter in parameters:
        if parameter.dtype not in (*gradients.HALF, torch.float32):
            raise ConfigError(
                f"the model has parameters of type {parameter.dtype}, of which a float32 copy would lose a part. Leave "
                "master_weights out: they are for half-precision models."
            )
    return [nn.Parameter(parameter.detach().float().clone()) for parameter in parameters]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class NativeGradients:
    """The window's gradient, accumulated by autograd in `.grad`, in the parameters' own types.

    Attributes:
        parameters: everything that can hold a gradient.
        mastered: those that have a master weight; None where there are no master weights.
    """

    mastered: Collection[nn.Parameter] | None = None

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters

    def clear(self) -> None:
        """Forget everything, before a window and after a failed one; `optimizer.zero_grad()` costs several times it."""
        for parameter in self.parameters:
            parameter.grad = None

    def absorb(self) -> None:
        """Take in what one backward pass left."""

    def trained(self) -> list[torch.dtype | None]:
        """The type of each parameter that has a gradient; None of the others."""
        return [None if parameter.grad is None else parameter.dtype for parameter in self.parameters]

    def whole(self) -> list[Tensor]:
        """The gradients accumulated so far, to measure and to scale in place."""
        return gradients.gradients_of(self.parameters)

    def hand_over(self) -> None:
        """Put the window's gradient where the optimizer looks for it."""

    def write_back(self) -> None:
        """Bring the optimizer's step into the model."""


class WideGradients(NativeGradients):
    """Half-precision gradients, summed in a wider type and rounded once, before the optimizer's step."""

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        super().__init__(parameters)
        self._dtype = dtype
        self._narrow = [parameter for parameter in parameters if parameter.dtype.itemsize < dtype.itemsize]
        self._sums: dict[nn.Parameter, Tensor] = {}

    def clear(self) -> None:
        super().clear()
        self._sums.clear()

    def absorb(self) -> None:
        fresh = [parameter for parameter in self._narrow if parameter.grad is not None]
        known = [parameter for parameter in fresh if parameter in self._sums]
        gradients.add([self._sums[parameter] for parameter in known], gradients.gradients_of(known))
        for parameter in fresh:
            if parameter not in self._sums:
                assert parameter.grad is not None
                self._sums[parameter] = parameter.grad.to(self._dtype)
            parameter.grad = None

    def trained(self) -> list[torch.dtype | None]:
        return [
            parameter.dtype if parameter in self._sums or parameter.grad is not None else None
            for parameter in self.parameters
        ]

    def whole(self) -> list[Tensor]:
        return [*self._sums.values(), *super().whole()]

    def hand_over(self) -> None:
        for parameter, total in self._sums.items():
            parameter.grad = total.to(parameter.dtype)
        self._sums.clear()


class MasterGradients(WideGradients):
    """Gradients summed in float32 and left in `.grad` of the master weights, on which the optimizer steps."""

    def __init__(self, parameters: Sequence[nn.Parameter], masters: Mapping[nn.Parameter, nn.Parameter]) -> None:
        super().__init__(parameters, torch.float32)
        self._masters = masters
        self.mastered = frozenset(masters)

    def whole(self) -> list[Tensor]:
        for parameter, master in self._masters.items():
            master.grad = self._sums.pop(parameter, parameter.grad)
        others = [parameter for parameter in self.parameters if parameter not in self._masters]
        return [*self._sums.values(), *gradients.gradients_of(others)]

    @torch.no_grad()
    def write_back(self) -> None:
        gradients.copy(list(self._masters), list(self._masters.values()))


def gradients_for(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    accum_dtype: torch.dtype | None,
    master_weights: Sequence[nn.Parameter] | None,
) -> NativeGradients:
    """Where the gradient of a window is accumulated.

    It spans everything that can hold a gradient: parameters that are frozen now may be trained later, and the
    optimizer may step on some (of the objective, say) that the model does not know.
    """
    stepped = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    parameters = list(dict.fromkeys(chain(model.parameters(), stepped)))
    if master_weights is not None:
        return MasterGradients(parameters, dict(zip(trainable(model), master_weights, strict=True)))
    return NativeGradients(parameters) if accum_dtype is None else WideGradients(parameters, accum_dtype)


LEAST_SCALE = 2.0**-14
"""Halved further, the scaled loss would vanish in fp16; a loss that is not finite is not the scale's doing."""


@dataclass
class LossScale:
    """What the loss is multiplied by so that small gradients survive fp16, found by trial.

    Halved after an overflow, doubled after `growth_interval` windows without one (Micikevicius et al., Mixed Precision
    Training, arXiv 1710.03740, section 3.2), with the values of torch.amp.GradScaler. That class itself keeps state
    between unscale and update, which an interrupted window would leave behind, and unscales only what its optimizer
    steps on.
    """

    value: float = 65536.0
    growth_interval: int = 2000
    good_windows: int = 0

    def outlook(self) -> str:
        """What an overflow at this value leads to."""
        if self.value > LEAST_SCALE:
            return ", which is halved now"
        return ", the least there is, so that the loss itself is not finite, or too large for fp16"

    def update(self, *, overflowed: bool) -> None:
        """Once a window, after its step was applied or skipped."""
        self.good_windows = 0 if overflowed else self.good_windows + 1
        if overflowed:
            self.value = max(self.value / 2, LEAST_SCALE)
        elif self.good_windows == self.growth_interval:
            self.value, self.good_windows = self.value * 2, 0

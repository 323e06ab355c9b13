"""What draws random numbers in a model, and how it is turned off for a comparison."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

ModelChange = Callable[[nn.Module], nn.Module]

SEEDS = 64
"""Of a model that draws random numbers: a layer dropped with a probability of 0.1 escapes once in eight hundred."""


@dataclass(frozen=True)
class Quiet:
    """What is random in a model, and how to turn it off.

    Attributes:
        names: layers that draw random numbers, or words for what no layer shows; empty where nothing is random.
        apply: turns it off in a new model.
        still_random: whether that did not help.
        in_evaluation: whether all but batch norms had to be put in evaluation mode for it.
    """

    names: tuple[str, ...]
    apply: ModelChange
    still_random: bool
    in_evaluation: bool = False


def quieten(make_model: Callable[[], nn.Module], gradient: Callable[[nn.Module], Sequence[Tensor]]) -> Quiet:
    """Find the mildest change under which the gradient does not depend on the random seed."""

    def is_random(change: ModelChange) -> bool:
        def at(seed: int) -> tuple[Sequence[Tensor], bool]:
            model = change(make_model())
            with seeded(model, seed):
                before = _states(model)
                return gradient(model), _states(model) != before

        first, draws = at(0)
        others = (at(seed)[0] for seed in range(1, SEEDS if draws else 3))
        return any(not torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))

    if not is_random(_unchanged):
        return Quiet((), _unchanged, still_random=False)
    layers = tuple(called(*layer) for layer in _dropouts(make_model()))
    if layers and not is_random(without_dropout):
        return Quiet(layers, without_dropout, still_random=False)
    names = (*layers, "something outside the dropout layers")
    return Quiet(names, frozen, still_random=is_random(frozen), in_evaluation=True)


def called(name: str, module: nn.Module) -> str:
    """A layer's name and type."""
    return f"{name or 'the model'} ({type(module).__name__})"


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with every dropout probability at 0."""
    for _, module in _dropouts(model):
        for name in ("p", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def frozen(model: nn.Module) -> nn.Module:
    """The model in evaluation mode, whatever mode is asked for later; batch norms, which draw nothing, train on."""
    for module in model.modules():
        if not isinstance(module, _BatchNorm):
            freeze(module)
    return model


def freeze(module: nn.Module) -> None:
    """Put one module in evaluation mode for good; a loop that asks for a mode is heard, and does not get it."""
    module.training = False
    module.train = partial(_ask, module)  # type: ignore[method-assign]


def _ask(module: nn.Module, mode: bool = True) -> nn.Module:
    module.__dict__["_mode_asked_for"] = mode
    for child in module.children():
        child.train(mode)
    return module


def mode_asked_for(module: nn.Module) -> bool:
    """Whether the module trains, or would if it were not frozen."""
    is_frozen = isinstance(module.__dict__.get("train"), partial)
    return bool(module.__dict__.get("_mode_asked_for", True)) if is_frozen else module.training


def _dropouts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        probability = (
            getattr(module, "p", None) if "Dropout" in type(module).__name__ else getattr(module, "dropout", None)
        )
        if isinstance(probability, float) and probability > 0:
            yield name, module


def _generators(model: nn.Module) -> list[torch.Generator]:
    """Those that layers hold as attributes."""
    values = (value for module in model.modules() for value in vars(module).values())
    return [value for value in values if isinstance(value, torch.Generator)]


def _states(model: nn.Module) -> tuple[Any, ...]:
    """Where all sources of random numbers stand, torch's, Python's and numpy's."""
    torchs = [torch.get_rng_state(), *(generator.get_state() for generator in _generators(model))]
    return random.getstate(), repr(np.random.get_state(legacy=False)), *(bytes(state.numpy()) for state in torchs)


@contextmanager
def seeded(model: nn.Module, seed: int) -> Iterator[None]:
    """Seed all of them, the model's own for good, and put the others back afterwards."""
    python, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        for generator in _generators(model):
            generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpys)


def _unchanged(model: nn.Module) -> nn.Module:
    return model

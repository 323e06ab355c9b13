from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradaccum import Accumulator, PreflightWarning
from tests.engine.reference import (
    CLASSIFICATION,
    accumulated,
    assert_same,
    gradient_of,
    make_batch,
    make_model,
    mean_loss,
    window_of,
)

IMPORTING_INDUCTOR = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is:DeprecationWarning")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@IMPORTING_INDUCTOR
@pytest.mark.parametrize(
    "compiled",
    [
        lambda model: torch.compile(model, backend="aot_eager"),
        lambda model: torch.compile(model, backend="eager", dynamic=True),
        lambda model: model,
    ],
    ids=["aot_eager", "dynamic", "not compiled"],
)
def test_compiled_models_have_the_same_gradients(compiled: Callable[[nn.Module], nn.Module]) -> None:
    torch._dynamo.reset()
    model = make_model()
    reference = gradient_of(mean_loss(model, make_batch()), model)
    step = Accumulator(compiled(model), sgd(model), CLASSIFICATION, clip_norm=1e3).step(window_of([5, 4, 3]))
    assert step.applied
    assert_same(accumulated(model), reference)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers = make_model()
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[0](inputs)
        return checkpoint(self.layers[1:], hidden, use_reentrant=self.reentrant)


def test_checkpointed_models_have_the_same_gradients() -> None:
    model, plain = Checkpointed(reentrant=False), make_model()
    reference = gradient_of(mean_loss(plain, make_batch()), plain)
    Accumulator(model, sgd(model), CLASSIFICATION).step(window_of([5, 4, 3]))
    assert_same(accumulated(model), reference)


def test_reentrant_checkpoints_are_warned_of_once() -> None:
    model = Checkpointed(reentrant=True)
    accumulator = Accumulator(model, sgd(model), CLASSIFICATION)
    with pytest.warns(PreflightWarning, match="use_reentrant=False") as warned:
        accumulator.step(window_of([5, 4, 3]))
    assert len(warned) == 1
    assert warned[0].filename == __file__
    accumulator.step(window_of([5, 4, 3]))  # a second warning would be an error

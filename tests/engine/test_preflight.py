from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.checkpoint import checkpoint

from gradaccum import Accumulator, ConfigError, Objective, PreflightWarning, master_weights
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


def refuse(message: str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: object) -> None:
    with pytest.raises(ConfigError, match=message):
        Accumulator(model, optimizer or sgd(model), CLASSIFICATION, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync": "never"}, r"sync='never' is unknown.*'last'"),
        ({"precision": "fp8"}, r"precision='fp8' is unknown.*float32, bf16, fp16"),
        ({"clip_norm": 0.0}, r"clip_norm=0.0 would erase"),
        ({"clip_norm": float("nan")}, r"clip_norm=nan"),
        ({"accum_dtype": torch.bfloat16}, r"accum_dtype=torch.bfloat16 is no wider"),
    ],
)
def test_options_that_cannot_be_right_are_refused(options: dict[str, object], message: str) -> None:
    refuse(message, make_model(), **options)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    model = make_model()
    refuse("LBFGS evaluates the loss several times", model, torch.optim.LBFGS(model.parameters()))


def test_an_optimizer_of_another_model_is_refused() -> None:
    refuse("the optimizer steps none of the model's trainable parameters", make_model(), sgd(make_model()))


def test_an_optimizer_that_does_not_step_on_the_master_weights_is_refused() -> None:
    model = make_model(torch.bfloat16)
    refuse("or of its master weights", model, master_weights=master_weights(model))


def test_schedulers_that_a_window_does_not_drive_are_refused() -> None:
    model = make_model()
    optimizer = sgd(model)
    refuse("the scheduler belongs to another optimizer", model, optimizer, scheduler=StepLR(sgd(model), 1))
    refuse("ReduceLROnPlateau steps on a validation metric", model, optimizer, scheduler=ReduceLROnPlateau(optimizer))


def test_master_weights_of_another_shape_or_type_are_refused() -> None:
    model = make_model(torch.bfloat16)
    masters = master_weights(model)
    for wrong in (masters[:-1], masters[::-1], [nn.Parameter(master.double()) for master in masters]):
        refuse("master_weights holds", model, torch.optim.SGD(wrong, lr=0.1), master_weights=wrong)
    optimizer = torch.optim.SGD(masters, lr=0.1)
    refuse("not the type of the master", model, optimizer, master_weights=masters, accum_dtype=torch.float64)


def test_a_loss_scale_over_half_precision_parameters_is_refused() -> None:
    refuse("half-precision gradients cannot be unscaled", make_model(torch.float16), precision="fp16")


def test_sparse_gradients_are_refused() -> None:
    refuse(r"module '0' makes sparse gradients", nn.Sequential(nn.Embedding(4, 2, sparse=True)))


@IMPORTING_INDUCTOR
@pytest.mark.parametrize(
    "options",
    [{"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"options": {"triton.cudagraphs": True}}],
    ids=str,
)
def test_models_that_replay_cuda_graphs_are_refused(options: dict[str, object]) -> None:
    refuse(r"the model is compiled with CUDA graphs", torch.compile(make_model(), **options))
    refuse(r"module '0' is compiled with CUDA graphs", nn.Sequential(torch.compile(make_model(), **options)))


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


def test_a_loss_that_nothing_can_learn_from_raises() -> None:
    model = make_model()
    objective = Objective(lambda model, batch: torch.zeros(()), lambda batch: 1)
    with pytest.raises(RuntimeError, match="does not require grad"):
        Accumulator(model, sgd(model), objective).step([make_batch()])

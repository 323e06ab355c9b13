from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from gradaccum import Accumulator, BatchError, ConfigError, Objective, master_weights
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


def build(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: object) -> Accumulator:
    return Accumulator(model, optimizer or sgd(model), CLASSIFICATION, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync": "never"}, r"sync='never' is unknown.*'last'"),
        ({"precision": "fp8"}, r"precision='fp8' is unknown.*float32, bf16, fp16"),
        ({"clip_norm": 0.0}, r"clip_norm=0.0 would erase"),
        ({"clip_norm": float("nan")}, r"clip_norm=nan"),
        ({"clip_norm": "1"}, r"clip_norm='1' is not a number"),
        ({"clip_norm": True}, r"clip_norm=True is not a number"),
        ({"accum_dtype": torch.bfloat16}, r"accum_dtype=torch.bfloat16 is no wider"),
        ({"scheduler": [1]}, r"scheduler is a list, not a torch LRScheduler.*SequentialLR"),
        ({"after_step": print}, r"after_step is no list of functions"),
    ],
)
def test_options_that_cannot_be_right_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(make_model(), **options)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((F.cross_entropy, sgd(make_model()), CLASSIFICATION), "model is a function, not a Module"),
        ((make_model(), make_model().parameters(), CLASSIFICATION), "optimizer is a generator, not an Optimizer"),
        ((make_model(), sgd(make_model()), F.cross_entropy), r"objective is a function, not an Objective.*loss_sum="),
    ],
)
def test_parts_of_another_kind_are_refused(parts: tuple[object, object, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Accumulator(*parts)


class Twice(torch.optim.SGD):
    def step(self, closure: Callable[[], float]) -> None:
        closure()
        super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Twice])
def test_an_optimizer_that_needs_a_closure_is_refused(kind: type[torch.optim.Optimizer]) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match=f"{kind.__name__} evaluates the loss several times"):
        build(model, kind(model.parameters()))


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="the optimizer steps none of the model's trainable parameters"):
        build(make_model(), sgd(make_model()))


def test_an_optimizer_that_does_not_step_on_the_master_weights_is_refused() -> None:
    model = make_model(torch.bfloat16)
    with pytest.raises(ConfigError, match="or of its master weights"):
        build(model, master_weights=master_weights(model))


def test_an_optimizer_that_steps_in_backward_is_refused() -> None:
    model = make_model()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: None)
    with pytest.raises(ConfigError, match=r"parameter '0\.weight' has a post-accumulate-grad hook"):
        build(model)


def test_schedulers_that_a_window_does_not_drive_are_refused() -> None:
    model = make_model()
    optimizer = sgd(model)
    with pytest.raises(ConfigError, match="the scheduler belongs to another optimizer"):
        build(model, optimizer, scheduler=StepLR(sgd(model), 1))
    with pytest.raises(ConfigError, match="ReduceLROnPlateau steps on a validation metric"):
        build(model, optimizer, scheduler=ReduceLROnPlateau(optimizer))


@pytest.mark.parametrize(
    "change",
    [
        lambda masters: masters[:-1],
        lambda masters: masters[::-1],
        lambda masters: [nn.Parameter(master.double()) for master in masters],
    ],
    ids=["too few", "another order", "another type"],
)
def test_master_weights_of_another_shape_or_type_are_refused(
    change: Callable[[list[nn.Parameter]], list[nn.Parameter]],
) -> None:
    model = make_model(torch.bfloat16)
    wrong = change(master_weights(model))
    with pytest.raises(ConfigError, match="master_weights holds"):
        build(model, torch.optim.SGD(wrong, lr=0.1), master_weights=wrong)


def test_sums_of_another_type_than_the_master_weights_are_refused() -> None:
    model = make_model(torch.bfloat16)
    masters = master_weights(model)
    with pytest.raises(ConfigError, match="not the type of the master"):
        build(model, torch.optim.SGD(masters, lr=0.1), master_weights=masters, accum_dtype=torch.float64)


def test_a_loss_scale_over_half_precision_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="half-precision gradients cannot be unscaled"):
        build(make_model(torch.float16), precision="fp16")


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"module '0' makes sparse gradients"):
        build(nn.Sequential(nn.Embedding(4, 2, sparse=True)))


class SparseRows(nn.Module):
    """Its gradient is sparse, and no layer says so."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(9, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.embedding(inputs, self.rows, sparse=True)


def test_a_sparse_gradient_that_no_layer_announced_is_refused_in_the_first_window() -> None:
    model, labels = SparseRows(), torch.arange(4)
    with pytest.raises(ConfigError, match=r"of shape \(9, 4\) got a sparse gradient"):
        build(model).step([(labels, labels)])
    assert model.rows.grad is None


@IMPORTING_INDUCTOR
@pytest.mark.parametrize(
    "options",
    [{"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"options": {"triton.cudagraphs": True}}],
    ids=str,
)
def test_models_that_replay_cuda_graphs_are_refused(options: dict[str, object]) -> None:
    compiled = torch.compile(make_model(), **options)
    with pytest.raises(ConfigError, match="the model is compiled with CUDA graphs"):
        build(compiled)
    with pytest.raises(ConfigError, match="module '0' is compiled with CUDA graphs"):
        build(nn.Sequential(compiled))


NO_GRADIENT = {
    "a constant": (lambda model, batch: torch.zeros(()), nullcontext, "depends on no trained parameter"),
    "detached": (lambda model, batch: model(batch[0]).sum().detach(), nullcontext, "depends on no trained parameter"),
    "without gradients": (CLASSIFICATION.loss_sum, torch.no_grad, r"step\(\) was called under torch.no_grad"),
    "in inference mode": (CLASSIFICATION.loss_sum, torch.inference_mode, r"step\(\) was called under torch.no_grad"),
}


@pytest.mark.parametrize(("loss_sum", "around", "message"), NO_GRADIENT.values(), ids=NO_GRADIENT)
def test_a_loss_that_nothing_can_learn_from_is_refused(
    loss_sum: Callable[..., torch.Tensor], around: Callable[[], AbstractContextManager[None]], message: str
) -> None:
    model = make_model()
    accumulator = Accumulator(model, sgd(model), Objective(loss_sum, lambda batch: 1))
    with around(), pytest.raises(BatchError, match=message):
        accumulator.step([make_batch()])
    assert Accumulator(model, sgd(model), CLASSIFICATION).step([make_batch()]).applied


def test_a_model_frozen_as_a_whole_is_refused_and_trains_again_when_thawed() -> None:
    model = make_model()
    accumulator = build(model)
    model.requires_grad_(False)
    with pytest.raises(BatchError, match="no parameter of the model requires a gradient any more"):
        accumulator.step([make_batch()])
    model.requires_grad_(True)
    assert accumulator.step([make_batch()]).applied


def test_a_term_that_is_a_constant_where_it_has_no_target_is_none_of_it() -> None:
    """What a detector returns for a micro-batch without boxes."""
    model = make_model()
    objective = Objective(
        lambda model, batch: {
            "classes": CLASSIFICATION.loss_sum(model, batch),
            "boxes": torch.zeros(()) if len(batch[0]) < 5 else model(batch[0]).sum(),
        },
        lambda batch: {"classes": len(batch[0]), "boxes": len(batch[0]) if len(batch[0]) >= 5 else 0},
        weights={"classes": 1.0, "boxes": 1.0},
    )
    first, *_ = window_of([5, 4, 3])
    reference = gradient_of(mean_loss(model, make_batch()) + model(first[0]).sum() / 5, model)
    Accumulator(model, sgd(model), objective).step(window_of([5, 4, 3]))
    assert_same(accumulated(model), reference)

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from gradaccum import Accumulator, Objective, split
from gradaccum.engine.precision import LossScale
from tests.engine.reference import (
    CLASSIFICATION,
    UNEVEN_CUTS,
    accumulated,
    assert_same,
    gradient_of,
    make_batch,
    make_model,
    mean_loss,
    parameters_of,
    relative_error,
    same_state,
    snapshot,
    window_of,
)

UNIT_ROUNDOFF = {"float32": 2**-24, "bf16": 2**-8, "fp16": 2**-11}
CUTS = pytest.mark.parametrize("cut", UNEVEN_CUTS, ids=str)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@CUTS
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_every_precision_stays_within_its_rounding_of_the_float64_gradient(cut: list[int], precision: str) -> None:
    model, exact = make_model(torch.float32), make_model(torch.float64)
    reference = gradient_of(mean_loss(exact, make_batch()), exact)
    step = Accumulator(model, sgd(model), CLASSIFICATION, precision=precision).step(window_of(cut, torch.float32))
    assert step.applied
    assert relative_error(accumulated(model), reference) < 8 * UNIT_ROUNDOFF[precision]
    assert step.loss.dtype == torch.float32


def test_forward_and_loss_run_under_autocast_and_backward_does_not() -> None:
    seen: list[tuple[str, bool]] = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, value: Tensor) -> Tensor:
            seen.append(("forward", torch.is_autocast_enabled("cpu")))
            return value.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            seen.append(("backward", torch.is_autocast_enabled("cpu")))
            return gradient

    def loss_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(batch[0])
        assert logits.dtype == torch.bfloat16
        return F.cross_entropy(Watch.apply(logits), batch[1], reduction="sum")

    def count(batch: tuple[Tensor, Tensor]) -> int:
        seen.append(("count", torch.is_autocast_enabled("cpu")))
        return len(batch[1])

    model = make_model(torch.float32)
    Accumulator(model, sgd(model), Objective(loss_sum, count), precision="bf16").step([make_batch(4, torch.float32)])
    assert seen == [("count", False), ("forward", True), ("backward", False)]


@pytest.mark.parametrize("clip_norm", [None, 1e-2])
def test_the_loss_scale_is_taken_out_once_before_the_clip(clip_norm: float | None) -> None:
    """A float64 model under fp16's loss scale alone (no layer computes in fp16) is exactly the plain step."""
    objective = Objective(
        lambda model, batch: _without_autocast(CLASSIFICATION.loss_sum, model, batch), CLASSIFICATION.count
    )
    model, plain = make_model(), make_model()
    mean_loss(plain, make_batch()).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), float("inf") if clip_norm is None else clip_norm)
    sgd(plain).step()
    step = Accumulator(model, sgd(model), objective, precision="fp16", clip_norm=clip_norm).step(window_of([5, 4, 3]))
    assert_same([step.grad_norm, *accumulated(model)], [norm, *accumulated(plain)])
    assert_same(parameters_of(model), parameters_of(plain))


def _without_autocast(call: Callable[..., Tensor], *arguments: object) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return call(*arguments)


def test_an_overflow_skips_step_scheduler_and_callbacks_and_says_so() -> None:
    model, called = make_model(torch.float32), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scheduler = StepLR(optimizer, 1)
    accumulator = Accumulator(
        model, optimizer, CLASSIFICATION, precision="fp16", scheduler=scheduler, after_step=[called.append]
    )
    accumulator.step(window_of([5, 4, 3], torch.float32))
    before = snapshot(model, optimizer, scheduler)
    inputs, labels = make_batch(12, torch.float32)
    inputs[7] = 1e30
    step = accumulator.step(split((inputs, labels), [5, 4, 3]))
    assert same_state(snapshot(model, optimizer, scheduler), before)
    assert not step.applied
    assert not step.grad_norm.isfinite()
    assert "overflowed at a loss scale of 65536" in step.skip_reason
    assert accumulator.loss_scale == LossScale(value=32768.0)
    assert accumulated(model) == []
    assert (len(called), accumulator.steps) == (1, 1)

    assert accumulator.step(window_of([5, 4, 3], torch.float32)).applied
    assert accumulator.loss_scale == LossScale(value=32768.0, good_windows=1)


def test_a_window_without_targets_says_nothing_about_the_loss_scale() -> None:
    model = make_model(torch.float32)
    accumulator = Accumulator(model, sgd(model), CLASSIFICATION, precision="fp16")
    inputs, labels = make_batch(12, torch.float32)
    accumulator.step([(inputs, torch.full_like(labels, -100))])
    assert accumulator.loss_scale == LossScale()


def test_the_loss_scale_halves_on_overflow_and_doubles_after_good_windows_in_a_row() -> None:
    scale = LossScale(value=8.0, growth_interval=3)
    values = []
    for overflowed in [False, False, True, False, False, False, False]:
        scale.update(overflowed=overflowed)
        values.append(scale.value)
    assert values == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0]


def test_the_loss_scale_survives_many_windows_that_are_not_finite() -> None:
    model = nn.Linear(4, 3)
    accumulator = Accumulator(model, sgd(model), Objective.classification(), precision="fp16")
    labels = torch.zeros(4, dtype=torch.long)
    for _ in range(200):
        accumulator.step([(torch.full((4, 4), float("nan")), labels)])
    step = accumulator.step([(torch.ones(4, 4), labels)])
    assert step.applied
    assert step.grad_norm > 0

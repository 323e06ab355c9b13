from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from gradaccum import Accumulator, Objective, master_weights, split
from gradaccum.engine import gradients
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
    same_state,
    snapshot,
    window_of,
)

UNIT_ROUNDOFF = {"float32": 2**-24, "bf16": 2**-8, "fp16": 2**-11}
CUTS = pytest.mark.parametrize("cut", UNEVEN_CUTS, ids=str)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def relative_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Of the whole gradient, in the L2 norm."""
    difference = gradients.global_norm([a.double() - b.double() for a, b in zip(actual, expected, strict=True)])
    return float(difference / gradients.global_norm(expected))


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


def error_of(accumulate: Callable[[nn.Module], list[Tensor]], samples: int) -> float:
    """Largest error of the gradient of a bf16 model, relative to the largest float64 entry of its tensor."""
    model = make_model(torch.bfloat16, seed=3)
    exact = make_model(torch.bfloat16, seed=3).double()
    inputs, labels = make_batch(samples, torch.bfloat16, seed=4)
    reference = gradient_of(mean_loss(exact, (inputs.double(), labels)), exact)
    return max(
        float((actual.double() - truth).abs().max() / truth.abs().max())
        for actual, truth in zip(accumulate(model), reference, strict=True)
    )


def test_float32_buffers_keep_what_bf16_sums_lose_over_512_micro_batches() -> None:
    """Each bf16 addition rounds to 8 bits, so late micro-batches fall below half a unit of the sum and are lost."""
    window = split(make_batch(512, torch.bfloat16, seed=4), 1)

    def accumulate(model: nn.Module, **options: object) -> list[Tensor]:
        Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), CLASSIFICATION, **options).step(window)
        return accumulated(model)

    full_batch = error_of(
        lambda model: gradient_of(CLASSIFICATION.loss_sum(model, make_batch(512, torch.bfloat16, seed=4)) / 512, model),
        512,
    )
    bf16_sums = error_of(accumulate, 512)
    float32_sums = error_of(lambda model: accumulate(model, accum_dtype=torch.float32), 512)
    assert float32_sums < 0.02
    assert float32_sums < 2 * full_batch
    assert bf16_sums > 5 * float32_sums


@pytest.mark.parametrize("clip_norm", [None, 1e-2])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_wide_sums_are_rounded_once_into_the_type_that_the_optimizer_needs(
    optimizer: type[torch.optim.Optimizer], clip_norm: float | None
) -> None:
    model = make_model(torch.bfloat16)
    steps_on = optimizer(model.parameters(), lr=10.0)  # so that bf16 resolves even clipped updates
    accumulator = Accumulator(model, steps_on, CLASSIFICATION, accum_dtype=torch.float32, clip_norm=clip_norm)
    before = parameters_of(model)
    exact = make_model(torch.bfloat16).double()
    window = window_of([5, 4, 3], torch.bfloat16)
    sums = [torch.zeros_like(parameter) for parameter in exact.parameters()]
    for batch in window:
        fresh = make_model(torch.bfloat16)
        (CLASSIFICATION.loss_sum(fresh, batch)).backward(torch.tensor(1 / 12))
        sums = [total + part.double() for total, part in zip(sums, accumulated(fresh), strict=True)]
    step = accumulator.step(window)
    norm = gradients.global_norm(sums)
    assert_same([step.grad_norm], [norm], rtol=1e-6)
    factor = 1.0 if clip_norm is None else min(1.0, clip_norm / float(norm))
    assert_same(accumulated(model), [(total * factor).bfloat16() for total in sums], rtol=2**-8)
    assert all(gradient.dtype == torch.bfloat16 for gradient in accumulated(model))
    assert step.grad_norm.dtype == torch.float32
    assert not any(map(torch.equal, before, parameters_of(model)))


def test_master_weights_keep_updates_too_small_for_bf16() -> None:
    """A step of 1/1000 of a weight is below bf16's resolution: lost without masters, kept with them."""

    def train(model: nn.Module, stepped: list[nn.Parameter], **options: object) -> None:
        optimizer = torch.optim.SGD(stepped, lr=1e-3)
        accumulator = Accumulator(model, optimizer, Objective(lambda m, b: m(b).sum(), len), **options)
        for _ in range(8):
            assert accumulator.step([torch.ones(2, 1, dtype=torch.bfloat16)] * 2).applied

    plain, mastered = (nn.Linear(1, 1, bias=False, dtype=torch.bfloat16) for _ in range(2))
    nn.init.ones_(plain.weight)
    nn.init.ones_(mastered.weight)
    train(plain, list(plain.parameters()))
    masters = master_weights(mastered)
    train(mastered, masters, master_weights=masters)
    assert plain.weight.item() == 1.0
    assert masters[0].item() == pytest.approx(1 - 8e-3, abs=1e-6)
    assert mastered.weight.item() == torch.tensor(1 - 8e-3).bfloat16().item()


@pytest.mark.parametrize("clip_norm", [None, 1e-2])
def test_master_weights_step_as_float32_does_on_the_same_gradients(clip_norm: float | None) -> None:
    model, buffered = make_model(torch.bfloat16), make_model(torch.bfloat16)
    masters = master_weights(model)
    plain = [nn.Parameter(parameter.detach().float()) for parameter in buffered.parameters()]
    optimizer, plain_optimizer = torch.optim.AdamW(masters, lr=0.01), torch.optim.AdamW(plain, lr=0.01)
    accumulator = Accumulator(model, optimizer, CLASSIFICATION, master_weights=masters, clip_norm=clip_norm)
    for _ in range(3):
        for parameter, source in zip(buffered.parameters(), plain, strict=True):
            parameter.data.copy_(source.data)
            source.grad = torch.zeros_like(source)
        for batch in window_of([5, 4, 3], torch.bfloat16):
            CLASSIFICATION.loss_sum(buffered, batch).backward(torch.tensor(1 / 12))
            for parameter, source in zip(buffered.parameters(), plain, strict=True):
                source.grad += parameter.grad.float()
                parameter.grad = None
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(plain, clip_norm)
        plain_optimizer.step()
        accumulator.step(window_of([5, 4, 3], torch.bfloat16))
        assert_same(masters, plain, rtol=1e-6)
        assert_same(parameters_of(model), [master.detach().bfloat16() for master in masters])


def test_master_weights_let_fp16_models_train_under_a_loss_scale() -> None:
    model = make_model(torch.float16)
    masters = master_weights(model)
    accumulator = Accumulator(
        model, torch.optim.SGD(masters, lr=0.1), CLASSIFICATION, precision="fp16", master_weights=masters
    )
    exact = make_model(torch.float16).double()
    reference = gradient_of(mean_loss(exact, make_batch()), exact)
    for _ in range(4):  # the first loss scale overflows fp16's largest number, and is found by trial
        inputs, labels = make_batch()
        if accumulator.step(split((inputs.half(), labels), [5, 4, 3])).applied:
            break
    assert accumulator.steps == 1
    assert relative_error([master.grad for master in masters if master.grad is not None], reference) < 8 * 2**-11


def test_models_of_mixed_types_widen_only_what_is_narrow() -> None:
    model = make_model(torch.bfloat16)
    model[2].float()
    objective = Objective(
        lambda model, batch: F.cross_entropy(model[2](model[1](model[0](batch[0])).float()), batch[1], reduction="sum"),
        CLASSIFICATION.count,
    )
    for options in ({"accum_dtype": torch.float32}, {"master_weights": master_weights(model)}):
        stepped = options.get("master_weights") or model.parameters()
        step = Accumulator(model, torch.optim.SGD(stepped, lr=0.0), objective, **options).step(
            window_of([5, 4, 3], torch.bfloat16)
        )
        exact = make_model(torch.bfloat16).double()
        exact[2].load_state_dict(model[2].state_dict())
        inputs, labels = make_batch(12, torch.bfloat16)
        reference = gradient_of(mean_loss(exact, (inputs.double(), labels)), exact)
        found = [parameter.grad for parameter in stepped] if "master_weights" in options else accumulated(model)
        assert relative_error(found, reference) < 8 * 2**-8
        assert_same([step.grad_norm], [gradients.global_norm(reference)], rtol=8 * 2**-8)

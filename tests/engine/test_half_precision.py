"""Models whose parameters are half precision: their gradients' sums in a wider type, and master weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradaccum import Accumulator, Objective, master_weights, split
from gradaccum.engine import gradients
from tests.engine.reference import (
    CLASSIFICATION,
    accumulated,
    assert_same,
    gradient_of,
    make_batch,
    make_model,
    mean_loss,
    parameters_of,
    relative_error,
    window_of,
)


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
    assert bf16_sums > 0.05
    assert bf16_sums > 10 * float32_sums


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

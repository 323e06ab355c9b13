"""Models that an engine must be right about although nobody tests with them: every one against one float64 pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from gradaccum import Accumulator, NoiseScale, Objective, split
from tests.engine.reference import (
    CLASSES,
    CLASSIFICATION,
    FEATURES,
    accumulated,
    assert_same,
    both_gradients,
    gradient_of,
    make_batch,
    make_model,
    mean_loss,
    parameters_of,
    window_of,
)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Linear(FEATURES, FEATURES)).double()
    model[2].weight = model[0].weight
    return model


def with_first_layer(change: Callable[[nn.Module], object]) -> nn.Module:
    model = make_model()
    changed = change(model[0])
    return nn.Sequential(changed, *model[1:]).double() if isinstance(changed, nn.Module) else model


def lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(5, dtype=torch.float64), *make_model()[1:])
    model(make_batch()[0])
    return model


class Complex(nn.Module):
    """Complex parameters under a real loss."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(FEATURES, CLASSES, generator=generator, dtype=torch.complex128))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs.to(torch.complex128) @ self.weight).abs()


class WithEmptyParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs + self.empty.sum()


class SometimesUnused(nn.Module):
    """A head that only some micro-batches reach."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = make_model(), nn.Linear(CLASSES, CLASSES).double()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        reached = inputs[:, :1] > 1
        return torch.where(reached, self.head(outputs), outputs) if reached.any() else outputs


MODELS = {
    "tied weights": tied,
    "weight norm": lambda: with_first_layer(parametrizations.weight_norm),
    "orthogonal": lambda: with_first_layer(parametrizations.orthogonal),
    "spectral norm, evaluated": lambda: with_first_layer(parametrizations.spectral_norm).eval(),
    "materialised lazily": lazy,
    "an empty parameter": WithEmptyParameter,
    "a head that some micro-batches reach": SometimesUnused,
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_unusual_models_have_the_gradient_of_the_full_batch(make: Callable[[], nn.Module]) -> None:
    assert_same(*both_gradients(make(), CLASSIFICATION, make_batch()))


def test_rows_of_an_embedding_that_forward_renormalises_have_the_gradient_of_the_full_batch() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Linear(4, CLASSES)).double()
    batch = (torch.arange(12) % 9, torch.arange(12) % CLASSES)
    assert_same(*both_gradients(model, CLASSIFICATION, batch))


def penalised(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy and the squared gradient of its sum by the inputs: a loss that differentiates twice."""
    inputs = batch[0].detach().requires_grad_()
    loss = F.cross_entropy(model(inputs), batch[1], reduction="sum")
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    return loss + slope.square().sum()


def test_a_penalty_on_gradients_has_the_gradient_of_the_full_batch() -> None:
    objective = Objective(penalised, CLASSIFICATION.count)
    assert_same(*both_gradients(make_model(), objective, make_batch()))


class WithScale(nn.Module):
    """A linear layer, and a parameter of shape [1] that a loss uses through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1).double()
        self.scale = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, batch: Tensor) -> Tensor:
        squares: Tensor = self.linear(batch).square().sum()
        return squares + len(batch) * self.scale.squeeze()


def still(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that moves nothing."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}])
@pytest.mark.parametrize("cut", [[8], [4, 4], [5, 2, 1]])
def test_a_parameter_that_a_loss_only_views_has_the_same_gradient_in_every_window(
    cut: list[int], options: dict[str, Any]
) -> None:
    model = WithScale()
    batch = torch.randn(8, 4, dtype=torch.float64)
    (model(batch) / 8).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    accumulator = Accumulator(model, still(model), Objective(lambda m, b: m(b), len), **options)
    for _ in range(3):
        torch.testing.assert_close(accumulator.step(split(batch, cut)).grad_norm, expected)


def test_a_loss_is_that_of_before_the_step() -> None:
    model = WithScale()
    objective = Objective(lambda m, b: m.scale.squeeze(), lambda _: 1)
    step = Accumulator(model, torch.optim.SGD(model.parameters(), lr=1.0), objective).step([torch.ones(2, 4)])
    assert step.loss == 0
    assert model.scale.item() == -1


@pytest.mark.parametrize("clip_norm", [None, 1e-2])
def test_a_complex_gradient_is_clipped_by_its_absolute_values(clip_norm: float | None) -> None:
    model = Complex()
    reference = gradient_of(mean_loss(model, make_batch()), model)
    norm = torch.linalg.vector_norm(reference[0])
    step = Accumulator(model, still(model), CLASSIFICATION, clip_norm=clip_norm).step(window_of([5, 4, 3]))
    assert_same([step.grad_norm], [norm])
    factor = 1.0 if clip_norm is None else clip_norm / (norm + 1e-6)
    torch.testing.assert_close(accumulated(model), [part * factor for part in reference])


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float32])
def test_the_norm_of_a_model_of_many_types_is_that_of_all_its_gradients(narrow: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 5, dtype=narrow), nn.Linear(5, CLASSES, dtype=torch.float64))
    objective = Objective(lambda m, b: m[1](m[0](b.to(narrow)).double()).square().sum(), len)
    step = Accumulator(model, still(model), objective).step(split(make_batch()[0], [5, 4, 3]))
    flat = torch.cat([gradient.double().flatten() for gradient in accumulated(model)])
    assert_same([step.grad_norm], [flat.norm()], rtol=1e-6)


def test_parameters_in_groups_of_their_own_step_as_the_full_batch_does() -> None:
    model, plain = make_model(), make_model()

    def grouped(one: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": one[0].parameters(), "lr": 0.5}, {"params": one[2].parameters()}], lr=0.1)

    accumulator, optimizer = Accumulator(model, grouped(model), CLASSIFICATION), grouped(plain)
    for _ in range(2):
        optimizer.zero_grad()
        mean_loss(plain, make_batch()).backward()
        optimizer.step()
        accumulator.step(window_of([5, 4, 3]))
    assert_same(parameters_of(model), parameters_of(plain))


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("precision", ["float32", "fp16"])
def test_the_default_type_of_new_tensors_changes_no_step(default: torch.dtype, precision: str) -> None:
    accumulators = [
        Accumulator(
            model, torch.optim.SGD(model.parameters(), lr=0.1), CLASSIFICATION, precision=precision, clip_norm=0.1
        )
        for model in (make_model(torch.float32), make_model(torch.float32))
    ]
    window = window_of([5, 4, 3], torch.float32)
    expected, before = accumulators[0].step(window), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = accumulators[1].step(window)
    finally:
        torch.set_default_dtype(before)
    assert (found.loss.dtype, found.grad_norm.dtype) == (torch.float32, torch.float32)
    assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)
    assert_same(*(parameters_of(accumulator.model) for accumulator in accumulators), rtol=0)


def test_the_default_device_of_new_tensors_changes_no_step() -> None:
    model, window = make_model(), window_of([5, 4, 3])
    accumulator = Accumulator(model, still(model), CLASSIFICATION, clip_norm=1e3, observer=NoiseScale())
    with torch.device("meta"):  # where no number could be read
        step = accumulator.step(window)
    reference = gradient_of(mean_loss(model, make_batch()), model)
    assert_same(accumulated(model), reference)
    assert step.loss.is_cpu
    assert step.grad_norm.is_cpu


def test_deterministic_algorithms_change_no_gradient() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert_same(*both_gradients(make_model(), CLASSIFICATION, make_batch()))
    finally:
        torch.use_deterministic_algorithms(False)


def test_layers_frozen_and_thawed_between_windows_have_the_gradient_of_the_full_batch() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, CLASSIFICATION)
    for trained in (True, False, True):
        model[0].requires_grad_(trained)
        before, plain = parameters_of(model), copy.deepcopy(model)
        plain.zero_grad()
        mean_loss(plain, make_batch()).backward()
        accumulator.step(window_of([5, 4, 3]))
        assert_same(accumulated(model), accumulated(plain))
        moved = [not torch.equal(new, old) for new, old in zip(model.parameters(), before, strict=True)]
        assert moved == [trained, trained, True, True]

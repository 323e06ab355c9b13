"""A model or optimizer that is no longer what its Accumulator was built on is refused before anything is stepped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gradaccum import Accumulator, ConfigError, Objective, master_weights
from tests.engine.reference import (
    CLASSES,
    CLASSIFICATION,
    accumulated,
    assert_same,
    gradient_of,
    make_batch,
    make_model,
    mean_loss,
    parameters_of,
    window_of,
)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def replace_layer(model: nn.Module) -> None:
    model[2] = nn.Linear(5, CLASSES).double()


def replace_parameter(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(torch.ones(CLASSES, 5).double())


def parametrize(model: nn.Module) -> None:
    """It moves the weight into new parameters."""
    nn.utils.parametrizations.weight_norm(model[2])


@pytest.mark.parametrize("windows_before", [0, 1, 3])
@pytest.mark.parametrize("change", [replace_layer, replace_parameter, parametrize])
def test_a_replaced_parameter_is_refused_before_anything_is_stepped(
    change: Callable[[nn.Module], None], windows_before: int
) -> None:
    model = make_model()
    accumulator = Accumulator(model, sgd(model), CLASSIFICATION)
    for _ in range(windows_before):
        accumulator.step(window_of([5, 4, 3]))
    change(model)
    before = parameters_of(model)
    with pytest.raises(ConfigError, match=r"parameter '2\..*' is another than when .* Build the optimizer and the Acc"):
        accumulator.step(window_of([5, 4, 3]))
    assert_same(parameters_of(model), before, rtol=0)
    assert accumulator.steps == windows_before


@pytest.mark.parametrize("windows_before", [0, 1])
@pytest.mark.parametrize("convert", [nn.Module.bfloat16, lambda model: model[2].float()], ids=["all", "a layer"])
def test_a_model_converted_to_another_type_is_refused(
    convert: Callable[[nn.Module], object], windows_before: int
) -> None:
    model = make_model()
    accumulator = Accumulator(model, sgd(model), Objective(lambda m, b: m[2].weight.sum() + m[0].weight.sum(), len))
    for _ in range(windows_before):
        accumulator.step([torch.ones(2)])
    if windows_before and convert is not nn.Module.bfloat16:
        model[0].requires_grad_(False)  # so that another number of gradients makes it look
    convert(model)
    with pytest.raises(ConfigError, match=r"is torch\.(bfloat16|float32) now, but was torch\.float64 when this Accum"):
        accumulator.step([torch.ones(2)])


def test_after_a_refusal_a_new_accumulator_goes_on() -> None:
    model = make_model()
    accumulator = Accumulator(model, sgd(model), CLASSIFICATION)
    replace_layer(model)
    with pytest.raises(ConfigError, match="is another than"):
        accumulator.step(window_of([5, 4, 3]))
    reference = gradient_of(mean_loss(model, make_batch()), model)
    assert Accumulator(model, sgd(model), CLASSIFICATION).step(window_of([5, 4, 3])).applied
    assert_same(accumulated(model), reference)


def test_parameters_that_join_the_optimizer_later_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = sgd(model)
    accumulator = Accumulator(model, optimizer, Objective(lambda m, b: m(b).sum(), len))
    model.append(nn.Linear(4, 1))
    optimizer.add_param_group({"params": list(model[1].parameters())})
    with pytest.raises(ConfigError, match=r"steps 4 parameters, but had 2 .* Build it after"):
        accumulator.step([torch.ones(2, 4)])


def test_a_parameter_thawed_after_its_master_weights_were_made_is_refused() -> None:
    model = make_model(torch.bfloat16)
    model[0].requires_grad_(False)
    masters = master_weights(model)
    accumulator = Accumulator(model, torch.optim.SGD(masters, lr=0.1), CLASSIFICATION, master_weights=masters)
    accumulator.step(window_of([5, 4, 3], torch.bfloat16))
    model[0].requires_grad_(True)
    with pytest.raises(ConfigError, match=r"'0\.weight' is trained now, but was frozen when its master weights"):
        accumulator.step(window_of([5, 4, 3], torch.bfloat16))


@pytest.mark.parametrize("kind", ["native", "wide", "masters"])
def test_a_new_head_beside_as_many_parameters_unfrozen_is_refused(kind: str) -> None:
    """As many parameters get gradients as before, but not the same ones."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    dtype = torch.float32 if kind == "native" else torch.bfloat16
    model.to(dtype)
    masters = master_weights(model) if kind == "masters" else None
    optimizer = torch.optim.SGD(model.parameters() if masters is None else masters, lr=0.1)
    wide = torch.float32 if kind == "wide" else None
    accumulator = Accumulator(model, optimizer, CLASSIFICATION, accum_dtype=wide, master_weights=masters)
    model[0].requires_grad_(False)
    accumulator.step(window_of([4], dtype))
    model[0].requires_grad_(True)
    model[2] = nn.Linear(6, CLASSES, dtype=dtype)
    with pytest.raises(ConfigError, match="is another than when this Accumulator was built"):
        accumulator.step(window_of([4], dtype))


def test_a_later_layer_converted_alone_is_refused() -> None:
    class Casting(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs.to(self.weight.dtype)).float()

    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Casting(6, CLASSES))
    accumulator = Accumulator(model, sgd(model), CLASSIFICATION)
    accumulator.step(window_of([4], torch.float32))
    model[2].bfloat16()
    with pytest.raises(ConfigError, match=r"'2.weight' is torch.bfloat16 now, but was torch.float32"):
        accumulator.step(window_of([4], torch.float32))

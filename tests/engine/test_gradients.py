from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradaccum.engine import gradients
from tests.engine.reference import assert_same


def losses_of(leaf: Tensor) -> list[Tensor]:
    return [(leaf.exp() * leaf).sum(), leaf.sin().square().sum()]


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("operators", [torch.ops.aten, None])
def test_backward_is_autograds_own_bit_for_bit(monkeypatch: pytest.MonkeyPatch, operators: object, terms: int) -> None:
    one, several = gradients.backwards(operators)
    monkeypatch.setattr(gradients, "_backward_of_one", one)
    monkeypatch.setattr(gradients, "_backward_of_several", several)
    found, expected = (torch.linspace(-1, 1, 7, requires_grad=True) for _ in range(2))
    for _ in range(2):
        seeds = [torch.tensor(0.3), torch.tensor(-1.7)][:terms]
        gradients.backward(losses_of(found)[:terms], seeds)
        torch.autograd.backward(losses_of(expected)[:terms], seeds)
    assert found.grad is not None
    assert expected.grad is not None
    assert torch.equal(found.grad, expected.grad)


@pytest.mark.parametrize("raised", [ValueError("bad"), KeyboardInterrupt(), torch.OutOfMemoryError("full")])
def test_what_a_hook_raises_comes_out_of_backward_as_it_is(raised: BaseException) -> None:
    def hook(gradient: Tensor) -> None:
        raise raised

    leaf = torch.ones(3, requires_grad=True)
    loss = leaf * 2
    loss.register_hook(hook)
    with pytest.raises(type(raised)) as caught:
        gradients.backward([loss.sum()], [torch.tensor(1.0)])
    assert caught.value is raised


def test_a_loss_without_a_graph_is_refused_by_backward() -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradients.backward([torch.tensor(1.0)], [torch.tensor(1.0)])


NORMS = [gradients.global_norm, gradients._unread_norm]  # the second is what accelerators take


@pytest.mark.parametrize("norm_of", NORMS)
@pytest.mark.parametrize(
    "dtypes",
    [
        [torch.float32],
        [torch.float64],
        [torch.bfloat16],
        [torch.float16],
        [torch.bfloat16, torch.float32],
        [torch.float16, torch.float64],
        [torch.float32, torch.float64],
    ],
)
def test_the_global_norm_is_that_of_one_long_vector_at_least_in_float32(
    norm_of: Callable[[list[Tensor]], Tensor], dtypes: list[torch.dtype]
) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(shape).to(dtype) for shape in ((30, 7), (5,), ()) for dtype in dtypes]
    norm = norm_of(parts)
    assert norm.dtype in (torch.float32, torch.float64)
    assert_same([norm], [torch.cat([part.double().flatten() for part in parts]).norm()], rtol=1e-6)


@pytest.mark.parametrize(
    ("values", "expected"), [([3e30, 4e30], 5e30), ([1.0, math.inf], math.inf), ([math.inf, math.nan], None)]
)
def test_a_global_norm_is_finite_just_where_it_can_be(values: list[float], expected: float | None) -> None:
    norm = gradients.global_norm([torch.tensor(value) for value in values])
    assert not norm.isfinite() if expected is None else norm.item() == pytest.approx(expected)

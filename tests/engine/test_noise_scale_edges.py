from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradaccum import Accumulator, ConfigError, NoiseScale, Objective
from tests.engine.reference import CLASSIFICATION, gradient_of, make_model, window_of


def looking_at_its_own_gradient(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """As weightings of losses do."""
    loss: Tensor = CLASSIFICATION.loss_sum(model, batch)
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return loss


def penalised(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss: Tensor = CLASSIFICATION.loss_sum(model, batch)
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + torch.stack([slope.square().sum() for slope in slopes]).sum()


@pytest.mark.parametrize("loss_sum", [looking_at_its_own_gradient, penalised])
def test_gradients_that_a_loss_takes_itself_are_no_part_of_the_noise(loss_sum: Callable[..., Tensor]) -> None:
    model, noise, window = make_model(), NoiseScale(), window_of([5, 4, 3])
    means = [
        torch.cat([part.flatten() for part in gradient_of(loss_sum(model, batch) / len(batch[0]), model)])
        for batch in window
    ]
    counts = torch.tensor([5.0, 4.0, 3.0], dtype=torch.float64)
    whole = counts @ torch.stack(means) / 12
    expected = (counts * torch.stack(means).sub(whole).square().sum(1)).sum() / 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    Accumulator(model, optimizer, Objective(loss_sum, CLASSIFICATION.count), observer=noise).step(window)
    assert noise.windows()[0].trace == pytest.approx(float(expected))


@pytest.mark.parametrize("confidence", [95, 0, 1, -0.1, math.nan, "0.9"])
def test_a_confidence_that_is_no_share_is_refused(confidence: Any) -> None:
    model, noise = make_model(), NoiseScale()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    Accumulator(model, optimizer, CLASSIFICATION, observer=noise).step(window_of([5, 4, 3]))
    with pytest.raises(ConfigError, match=r"is no share between 0 and 1"):
        noise.estimate(confidence=confidence)

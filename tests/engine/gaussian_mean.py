"""A model whose noise scale is known: one vector, pulled to Gaussian samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.engine.accumulator import Accumulator
from gradaccum.engine.noise_scale import NoiseScale
from gradaccum.engine.objective import Objective


class Mean(nn.Module):
    """One vector m; the gradient of a sample x's loss 0.5 |m - x|^2 is m - x."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(features, dtype=torch.float64))
        self.unused = nn.Parameter(torch.zeros(3, dtype=torch.float64))


NEAREST = Objective(
    loss_sum=lambda model, batch: 0.5 * (model.mean - batch).square().sum(),
    count=len,
)


def frozen(model: nn.Module, noise: NoiseScale, objective: Objective = NEAREST, **options: Any) -> Accumulator:
    """An accumulator that never moves, so that all windows are of one distribution."""
    return Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.0), objective, observer=noise, **options)


def gaussian(samples: int, *, features: int, shift: float, generator: torch.Generator) -> Tensor:
    return shift + torch.randn(samples, features, generator=generator, dtype=torch.float64)


def per_sample_gradients(model: Mean, batch: Tensor) -> Tensor:
    return model.mean.detach() - batch


def by_hand(gradients: Tensor, cut: Sequence[int]) -> tuple[float, float]:
    """S and |G|^2 from every sample's gradient, in the formulas' own words."""
    means = torch.stack([part.mean(dim=0) for part in gradients.split(list(cut))])
    whole = gradients.mean(dim=0)
    counts = torch.tensor(cut, dtype=torch.float64)
    trace = (counts * (means - whole).square().sum(dim=1)).sum() / (len(cut) - 1)
    return float(trace), float(whole.square().sum() - trace / len(gradients))

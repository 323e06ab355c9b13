"""A workload of a user's own, as README shows how to write one."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from gradaccum import Objective, Workload


def regression(hidden: int = 8) -> Workload:
    """Least squares on 64 noisy samples."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 5, generator=generator)
    targets = inputs.sum(dim=1, keepdim=True) + 0.1 * torch.randn(64, 1, generator=generator)
    data = TensorDataset(inputs, targets)
    return Workload(
        name="regression",
        make_model=lambda: nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 1)),
        objective=Objective(
            loss_sum=lambda model, batch: (model(batch[0]) - batch[1]).square().sum(),
            count=lambda batch: len(batch[0]),
        ),
        train=data,
        validation=data,
        collate=default_collate,
    )


def masked() -> Workload:
    """Two classes of which half the labels are masked, so that a window of few samples may have no target at all."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 5, generator=generator)
    labels = (inputs.sum(dim=1) > 0).long().where(torch.rand(64, generator=generator) > 0.5, -100)
    data = TensorDataset(inputs, labels)
    return Workload(
        name="masked",
        make_model=lambda: nn.Linear(5, 2),
        objective=Objective.classification(),
        train=data,
        validation=data,
        collate=default_collate,
    )


def no_workload() -> str:
    return "a string"

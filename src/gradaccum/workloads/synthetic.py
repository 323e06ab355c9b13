"""Gaussian inputs and random labels: for sizing runs without data."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset, default_collate

from gradaccum.engine.objective import Objective
from gradaccum.workloads.accuracy import correct_labels
from gradaccum.workloads.choice import SyntheticOptions
from gradaccum.workloads.networks import mlp
from gradaccum.workloads.workload import Workload


def workload(options: SyntheticOptions) -> Workload:
    """Batches: inputs `[samples, in_features]`, labels `[samples]` below `out_features`; two hidden layers."""
    generator = torch.Generator().manual_seed(0)

    def samples(number: int) -> TensorDataset:
        inputs = torch.randn(number, options.in_features, generator=generator)
        return TensorDataset(inputs, torch.randint(options.out_features, (number,), generator=generator))

    return Workload(
        name="synthetic",
        make_model=lambda: mlp([options.in_features, options.hidden, options.hidden, options.out_features]),
        objective=Objective.classification(),
        train=samples(options.samples),
        validation=samples(max(1, options.samples // 8)),
        collate=default_collate,
        correct=correct_labels,
    )

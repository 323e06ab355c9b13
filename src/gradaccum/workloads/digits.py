"""scikit-learn's bundled 1797 handwritten digits, 8x8 pixels, and an MLP 64-128-128-10."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset, default_collate

from gradaccum.engine.objective import Objective
from gradaccum.workloads.accuracy import correct_labels
from gradaccum.workloads.networks import mlp
from gradaccum.workloads.workload import Workload

TRAIN = 1500


def workload() -> Workload:
    """Batches: inputs `[samples, 64]` in 0..1, labels `[samples]` in 0..9; 1500 train, 297 held out, a fixed split."""
    digits = load_digits()
    inputs = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, validation = order[:TRAIN], order[TRAIN:]
    return Workload(
        name="digits",
        make_model=lambda: mlp([64, 128, 128, 10]),
        objective=Objective.classification(),
        train=TensorDataset(inputs[train], labels[train]),
        validation=TensorDataset(inputs[validation], labels[validation]),
        collate=default_collate,
        correct=correct_labels,
    )

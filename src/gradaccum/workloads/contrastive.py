"""Top half of a digit against its bottom half, by InfoNCE: a loss that is no sum over samples.

Every sample of a batch is the negative of every other one, so micro-batches have fewer negatives than the full batch,
and accumulating their gradients minimises another loss. The known case of an objective that cannot be accumulated.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from gradaccum.engine.objective import Objective
from gradaccum.workloads import digits
from gradaccum.workloads.networks import mlp
from gradaccum.workloads.workload import Workload

TEMPERATURE = 0.1
HALF_PIXELS = 32
EMBEDDING = 16


class TwoTowers(nn.Module):
    """One network for each half. Shapes: two times `[samples, 32]` to two times unit vectors `[samples, 16]`."""

    def __init__(self) -> None:
        super().__init__()
        self.top = mlp([HALF_PIXELS, 64, EMBEDDING])
        self.bottom = mlp([HALF_PIXELS, 64, EMBEDDING])

    def forward(self, top: Tensor, bottom: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.top(top), dim=-1), F.normalize(self.bottom(bottom), dim=-1)


def workload() -> Workload:
    """Batches: top halves and bottom halves, `[samples, 32]` each; the same row belongs together."""
    source = digits.workload()
    return Workload(
        name="contrastive",
        make_model=TwoTowers,
        objective=Objective(info_nce, count=lambda batch: len(batch[0])),
        train=_halves(source.train),
        validation=_halves(source.validation),
        collate=default_collate,
    )


def info_nce(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Sum over samples of -log softmax of the right pair among all pairs (van den Oord, arXiv 1807.03748, eq. 4)."""
    top, bottom = model(*batch)
    similarities = top @ bottom.T / TEMPERATURE
    return F.cross_entropy(similarities, torch.arange(len(top), device=top.device), reduction="sum")


def _halves(samples: object) -> TensorDataset:
    assert isinstance(samples, TensorDataset)
    inputs = samples.tensors[0]
    return TensorDataset(inputs[:, :HALF_PIXELS], inputs[:, HALF_PIXELS:])

"""How many targets a classifier gets right."""

from __future__ import annotations

from torch import Tensor, nn

from gradaccum.engine.batching import Batch


def correct_labels(model: nn.Module, batch: Batch) -> Tensor:
    """Right predictions over `batch = (inputs, labels)`, a scalar; labels of -100 are no targets."""
    inputs, labels = batch
    right: Tensor = (model(inputs).argmax(dim=-1) == labels).sum()  # no class is -100
    return right

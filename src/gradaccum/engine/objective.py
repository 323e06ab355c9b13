"""What a window minimises: a sum over targets, and how many targets there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from gradaccum.engine.batching import Batch


@dataclass(frozen=True)
class Objective:
    """A loss that can be accumulated: its sum and its count are known for each micro-batch.

    The window's loss is `sum of loss_sum / sum of count`, so a micro-batch weighs as much as it has targets.

    Args:
        loss_sum: `(model, batch)` to the scalar **sum** of the loss over the batch's targets, never their mean.
        count: `batch` to the number of its targets (or the sum of their weights); must not need the model.
    """

    loss_sum: Callable[[nn.Module, Batch], Tensor]
    count: Callable[[Batch], int | float | Tensor]

    @classmethod
    def classification(cls, *, ignore_index: int = -100) -> Objective:
        """Cross-entropy over `batch = (inputs, labels)`; labels equal to `ignore_index` are no targets.

        Shapes: the model maps inputs to logits `[..., classes]`; labels are `[...]`, integers.
        """

        def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
            inputs, labels = batch
            logits = model(inputs)
            return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index, reduction="sum")

        def count(batch: Batch) -> Tensor:
            _, labels = batch
            counted: Tensor = (labels != ignore_index).sum()
            return counted

        return cls(loss_sum, count)

"""The one shape of everything that can be trained here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from gradaccum.engine.batching import Batch
from gradaccum.engine.objective import Objective


class Samples(Protocol):
    """Any map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True)
class Workload:
    """A model with its data and objective.

    Attributes:
        name: shown in tables and figures.
        make_model: builds the float32 model on the CPU; random numbers come from torch's global generator, which the
            caller seeds.
        objective: the loss as sum and count.
        train: training samples.
        validation: held-out samples.
        collate: a list of samples to the micro-batch that `objective` takes.
        correct: how many of a batch's targets the model gets right; None where that means nothing.
    """

    name: str
    make_model: Callable[[], nn.Module]
    objective: Objective
    train: Samples
    validation: Samples
    collate: Callable[[list[Any]], Batch]
    correct: Callable[[nn.Module, Batch], Tensor] | None = None

"""Models whose memory runs out, and everything about an accumulator that a trial must leave as it was."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum import Accumulator, Objective
from gradaccum.engine.observer import Note
from gradaccum.engine.random_state import random_state

SAMPLES = 24


class Running(nn.Module):
    """Subtracts a running mean, which every forward pass moves, and takes any number of samples."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean.lerp_(inputs.detach().mean(0), 0.1)
        return inputs - self.mean.clone()


class Model(nn.Module):
    """With buffers that a forward pass changes, random numbers, and a forward pass that is too large for memory."""

    def __init__(self, most: int = SAMPLES) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 8), Running(), nn.Dropout(0.3), nn.Linear(8, 3))
        self.most = most
        self.seen: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append(len(inputs))
        outputs: Tensor = self.inner(inputs)
        if len(inputs) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return outputs


def made(most: int = SAMPLES, **options: Any) -> Accumulator:
    torch.manual_seed(3)
    model = Model(most)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return Accumulator(model, optimizer, Objective.classification(), scheduler=scheduler, **options)


class Watching:
    """Notes every window whose gradient it is shown."""

    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def watch(self, parameters: Sequence[nn.Parameter], *, micro_batches: int) -> AbstractContextManager[Note]:
        del parameters, micro_batches
        return nullcontext(lambda count, factor: None)

    def finish(self, grad_norm: Tensor, count: float) -> None:
        self.seen.append(1)


def batches(number: int, samples: int = SAMPLES) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(samples, 5, generator=generator), torch.randint(3, (samples,), generator=generator))
        for _ in range(number)
    ]


def whole_state(accumulator: Accumulator) -> list[Tensor]:
    """Every tensor of model, gradient, optimizer and random state."""
    found: list[Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, Tensor):
            found.append(value.clone())
        elif isinstance(value, dict):
            for each in value.values():
                collect(each)
        elif isinstance(value, list | tuple):
            for each in value:
                collect(each)
        elif isinstance(value, int | float):
            found.append(torch.tensor(value, dtype=torch.float64))

    collect(accumulator.model.state_dict())
    collect([parameter.grad for parameter in accumulator.model.parameters()])
    collect(accumulator.state_dict())
    collect(random_state())
    return found


def assert_same_bits(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


class Stubborn(nn.Module):
    """Buffers that cannot be written to, one that forward replaces, one that it makes; and a hidden failure."""

    def __init__(self, error: type[Exception] | None) -> None:
        super().__init__()
        self.inner, self.error = nn.Linear(5, 3), error
        self.register_buffer("shared", torch.zeros(1).expand(5))
        with torch.inference_mode():
            self.register_buffer("fixed", torch.zeros(5))
        self.register_buffer("replaced", torch.zeros(5))
        self.register_buffer("made", None)
        self.register_buffer("running", torch.zeros(5))

    def forward(self, inputs: Tensor) -> Tensor:
        self.replaced, self.made = self.replaced + 1, torch.ones(5)
        self.running.add_(inputs.detach().mean(0))
        if self.error and len(inputs) > 6:
            raise self.error("hidden")
        outputs: Tensor = self.inner(inputs + self.shared + self.fixed)
        return outputs

"""What a measurement trains on: the workload on its device, with seeded models, optimizers and data order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradaccum.engine.batching import Batch, to
from gradaccum.errors import ConfigError
from gradaccum.measurements.setup import SGD, AdamW, Setup, settings_of
from gradaccum.workloads.workload import Workload


@dataclass(frozen=True)
class Bench:
    """A workload ready to be measured; the same setup always gives the same models and the same samples."""

    workload: Workload
    device: torch.device
    seed: int

    @classmethod
    def prepare(cls, setup: Setup) -> Bench:
        """Set the threads, find the device, load the workload."""
        torch.set_num_threads(setup.threads)
        return cls(setup.workload.load(), find_device(setup.device), setup.seed)

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """A new model in training mode, always with the same parameters."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return self.workload.make_model().to(self.device, dtype).train()

    def micro_batch(self, indices: Sequence[int], dtype: torch.dtype = torch.float32) -> Batch:
        """Training samples by index, collated on the device."""
        return to(self.workload.collate([self.workload.train[index] for index in indices]), self.device, dtype)

    def window(self, indices: Sequence[int], sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Batch]:
        """Samples cut into micro-batches of the given sizes, each collated by itself."""
        assert sum(sizes) == len(indices)
        rest = iter(indices)
        return [self.micro_batch([next(rest) for _ in range(size)], dtype) for size in sizes]

    def order(self, samples: int) -> list[int]:
        """Indices of the first samples of a shuffled training set, shuffled anew each time that it ends."""
        generator = torch.Generator().manual_seed(self.seed)
        indices: list[int] = []
        while len(indices) < samples:
            indices += torch.randperm(len(self.workload.train), generator=generator).tolist()
        return indices[:samples]


def find_device(name: str) -> torch.device:
    """`auto` is cuda where there is one, else cpu."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device = 'cuda', but torch finds no CUDA device here. Set device to cpu or auto.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def make_optimizer(model: nn.Module, settings: SGD | AdamW, **changes: Any) -> Optimizer:
    """torch's fused optimizer over the model's parameters (on the CPU too, where it saves a third of a small step).

    Sharded parameters take torch's default: it has no fused SGD for them.
    """
    kind = torch.optim.SGD if isinstance(settings, SGD) else torch.optim.AdamW
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fused = not any(hasattr(parameter, "full_tensor") for parameter in parameters)
    return kind(parameters, **{**settings_of(settings), "fused": fused, **changes})


def state_by_name(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
    """The optimizer's state of each parameter, by the parameter's name."""
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state:
            yield name, optimizer.state[parameter]


def equal_cut(effective_batch: int, accum_steps: int) -> list[int]:
    """`accum_steps` micro-batches of the same size."""
    assert effective_batch % accum_steps == 0
    return [effective_batch // accum_steps] * accum_steps


def consecutive(indices: Sequence[int], size: int) -> Iterable[Sequence[int]]:
    """Pieces of `size` indices, one after another."""
    return (indices[start : start + size] for start in range(0, len(indices), size))

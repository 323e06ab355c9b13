"""Ways to spread a window over ranks, and one window taken in each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradaccum.engine.accumulator import Accumulator
from gradaccum.engine.batching import Batch
from gradaccum.engine.gradient_sync import gradient_sync
from gradaccum.engine.objective import Objective
from gradaccum.measurements.distributed import Strategy
from gradaccum.measurements.setup import SGD, AdamW

SyncName = Literal["last", "every"]


@dataclass(frozen=True)
class Way:
    """How a window goes over ranks."""

    strategy: Strategy
    sync: SyncName
    keep_gathered: bool = False

    @property
    def name(self) -> str:
        return f"{self.strategy}/{'gathered' if self.keep_gathered else self.sync}"

    def accumulator(
        self, model: nn.Module, optimizer: Optimizer, objective: Objective, *, settings: SGD | AdamW
    ) -> Accumulator:
        return Accumulator(
            model,
            optimizer,
            objective,
            clip_norm=settings.clip_norm,
            sync=self.sync,
            keep_gathered=self.keep_gathered,
        )


def ways(strategies: Sequence[Strategy]) -> list[Way]:
    """Synced last and every time; FSDP2 also with parameters kept gathered."""
    found = []
    for strategy in strategies:
        found += [Way(strategy, "last"), Way(strategy, "every")]
        found += [Way(strategy, "last", keep_gathered=True)] if strategy == "fsdp2" else []
    return found


def spread(model: nn.Module, strategy: Strategy) -> nn.Module:
    """The model over all ranks; FSDP2 gathers and reduces layer by layer."""
    if strategy == "ddp":
        return DistributedDataParallel(model)
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The members with parameters of the outermost lists of modules, if they share no parameter."""
    found = list(_layers(model))
    owned = [parameter for layer in found for parameter in layer.parameters()]
    yield from found if len(set(owned)) == len(owned) else []


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            if any(True for _ in child.parameters()):
                yield child
        else:
            yield from _layers(child)


def mean_of_rank_means(
    model: nn.Module, optimizer: Optimizer, window: Sequence[Batch], *, objective: Objective
) -> Tensor:
    """The usual mistake over ranks: each divides by its own targets, and DDP averages the results."""
    totals = objective.totals(window)
    optimizer.zero_grad()
    losses = []
    for number, batch in enumerate(window, start=1):
        with gradient_sync(model, enabled=number == len(window)):
            losses.append(objective.share(model, batch, totals))
            losses[-1].backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return torch.stack(losses).sum().detach()


def even_share(micro_batch: int, accum_steps: int, world_size: int) -> list[list[int]]:
    """Sizes of each rank's micro-batches, the same for all."""
    return [[micro_batch] * accum_steps for _ in range(world_size)]


def uneven_share(micro_batch: int, accum_steps: int, world_size: int) -> list[list[int]]:
    """As many samples in all, but the first rank has half of its own, and the last rank what is missing."""
    samples = micro_batch * accum_steps
    few = max(1, samples // 2)
    middle = even_share(micro_batch, accum_steps, world_size - 2)
    return [cut(few, micro_batch), *middle, cut(2 * samples - few, micro_batch)]


def cut(samples: int, micro_batch: int) -> list[int]:
    """Whole micro-batches, and a last one of what is left."""
    whole, rest = divmod(samples, micro_batch)
    return [micro_batch] * whole + [rest] * bool(rest)

"""Whether ranks that should hold the same parameters do, before they step side by side for ever."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradaccum.engine.exchange import exchange
from gradaccum.engine.wrapping import data_parallel, is_sharded
from gradaccum.errors import ConfigError


def require_same_replicas(model: nn.Module) -> None:
    """Refuse replicas that differ: each rank would add the same updates to other parameters.

    DDP copies rank 0's when it wraps a model, fully_shard nothing. All ranks come here together.

    Raises:
        ConfigError: which parameter differs.
    """
    parameters = dict(model.named_parameters())
    if (ddp := data_parallel(model)) is not None:
        _require_same([*parameters], [*parameters.values()], ddp.process_group)
    elif is_sharded(model):
        shards = cast("dict[str, Any]", parameters)
        mesh = next(iter(shards.values())).device_mesh
        if mesh.ndim > 1:
            _require_same([*shards], [each.to_local() for each in shards.values()], mesh.get_group(0))


def _require_same(names: list[str], tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    if dist.get_world_size(group) == 1 or any(each.is_meta for each in tensors):
        return
    sums = torch.stack([each.detach().sum(dtype=torch.float64) for each in tensors])
    told = exchange(sums.nan_to_num(), group)
    for name, same in zip(names, (told == told[0]).all(0).tolist(), strict=True):
        if not same:
            raise ConfigError(
                f"parameter {name!r} is not the same on all ranks, and equal steps from unequal parameters never make "
                "them so. Build and load the model alike on every rank before it is wrapped (seed first; load a "
                "checkpoint on all of them), and leave DDP's init_sync at True."
            )

"""How a model is spread over ranks: plain, wrapped in DistributedDataParallel, or sharded with fully_shard."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from gradaccum.engine.exchange import several_ranks
from gradaccum.errors import ConfigError, PreflightWarning


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that torch.compile was given."""
    return getattr(model, "_orig_mod", model)


def data_parallel(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP that holds the model, if one does."""
    inner = uncompiled(model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def is_sharded(module: nn.Module) -> bool:
    """Whether fully_shard was applied to the module itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes a second, which one process need not wait
    return fsdp is not None and isinstance(uncompiled(module), fsdp.FSDPModule)


def shard_groups(model: nn.Module) -> list[Any]:
    """torch's own record of each group of parameters that is gathered and reduced together."""
    states: Iterator[Any] = (module._get_fsdp_state() for module in model.modules() if is_sharded(module))  # type: ignore[operator]
    return list(chain.from_iterable(map(_groups_of, states)))


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group  # before torch 2.12 a module had one at most
    return [] if group is None else [group]


def require_spread(model: nn.Module, optimizer: Optimizer, *, observer: object, wide: object, sync: str) -> None:
    """Refuse what cannot be right over several ranks; `wide` is given where gradients are summed outside `.grad`.

    Raises:
        ConfigError: what is wrong, and what to do.
    """
    require_wrapping(model)
    warn_of_one_alone(model)
    if (data_parallel(model) is not None or is_sharded(model)) and dist.get_world_size() > 1:
        require_reduced(model, optimizer, wide=wide, sync=sync)
        require_visible(model, observer)
        warn_of_batch_norm(model)


def require_wrapping(model: nn.Module) -> None:
    """Refuse a model whose wrapper would reduce its gradients twice, in part, or not at all."""
    top = uncompiled(model)
    for name, module in top.named_modules():
        if (wrapper := _other_wrapper(module)) is not None:
            raise ConfigError(
                f"{_named(name)} is wrapped in {wrapper}, which this engine does not know how to keep "
                "from reducing on every micro-batch. Use DistributedDataParallel, or fully_shard."
            )
        if module is not top and (isinstance(module, DistributedDataParallel) or _alone_sharded(module, top)):
            raise ConfigError(
                f"{_named(name)} is wrapped inside a model that is "
                f"{'wrapped itself' if is_sharded(top) or data_parallel(top) else 'not'}, so its gradients would be "
                "divided twice, or the others' not reduced. Wrap once, at the top: DistributedDataParallel(model), or "
                "fully_shard on the parts and then on the model."
            )
    if is_sharded(model):
        _require_whole_world(model)
        return
    _require_whole_parameters(top)
    if (ddp := data_parallel(model)) is not None:
        _require_dynamic(ddp)


def _other_wrapper(module: nn.Module) -> str | None:
    """The name of a way over ranks that is none of ours; `replicate` leaves a class of a made-up name."""
    if isinstance(module, DataParallel) or type(module).__name__ == "FullyShardedDataParallel":
        return type(module).__name__
    return "replicate" if hasattr(module, "set_requires_gradient_sync") and not is_sharded(module) else None


def _require_whole_parameters(top: nn.Module) -> None:
    """Refuse a part of a parameter that passes for all of it: a DTensor, or what DDP leaves of one in its place."""
    tensor = sys.modules.get("torch.distributed.tensor")
    for name, parameter in top.named_parameters():
        if (tensor is not None and isinstance(parameter, tensor.DTensor)) or hasattr(parameter, "_st_info"):
            raise ConfigError(
                f"parameter {name!r} is spread over ranks by tensor parallelism, of whose gradient this engine would "
                "take one rank's part for the whole, in norm and clip. Use DistributedDataParallel, or fully_shard "
                "over all ranks, without tensor parallelism."
            )


def _alone_sharded(module: nn.Module, top: nn.Module) -> bool:
    return is_sharded(module) and not is_sharded(top)


def _require_dynamic(ddp: DistributedDataParallel) -> None:
    if ddp.static_graph:
        raise ConfigError(
            "the model is in DistributedDataParallel(static_graph=True), which remembers which parameters the first "
            "backward pass of a run reduced, and a window's passes differ in that. Leave static_graph at False."
        )


def _require_whole_world(model: nn.Module) -> None:
    from torch.distributed.tensor import DTensor, Replicate  # noqa: PLC0415 (takes a second)

    if not hasattr(uncompiled(model), "reset_iter_state"):
        raise ConfigError(
            f"torch {torch.__version__} cannot reset a sharded model after a window that failed, so the next window's "
            "gradient might hold parts of it. Use torch 2.13 or newer with fully_shard."
        )
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            if parameter.requires_grad:
                raise ConfigError(
                    f"parameter {name!r} of the sharded model is not sharded, so its gradient would not be reduced. "
                    "Freeze it, or take it out of ignored_params."
                )
            continue
        mesh, placements = parameter.device_mesh, parameter.placements
        replicas_then_shards = (
            all(isinstance(each, Replicate) for each in placements[:-1]) and placements[-1].is_shard()
        )
        if mesh.size() != dist.get_world_size() or not replicas_then_shards:
            raise ConfigError(
                f"parameter {name!r} is placed as {placements} on a mesh of {mesh.size()} of {dist.get_world_size()} "
                "ranks; with tensor parallelism or ranks left out, a sum over ranks is no sum over micro-batches. "
                "Shard over all ranks: a mesh of one dimension, or of replicas and shards."
            )
    for group in shard_groups(model):
        if group.gradient_divide_factor not in (None, float(dist.get_world_size())):
            raise ConfigError(
                f"the model's gradient divide factor is set to {group.gradient_divide_factor}, but the window is "
                "divided by its targets, and needs the mean over ranks. Leave set_gradient_divide_factor out."
            )


def require_reduced(model: nn.Module, optimizer: Optimizer, *, wide: object, sync: str) -> None:
    """Refuse a step on gradients that the ranks do not reduce."""
    stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if wide is None and not stepped.issubset(model.parameters()):
        raise ConfigError(
            f"the optimizer steps on {len(stepped.difference(model.parameters()))} parameters that the model does not "
            "hold, whose gradients would not be reduced, so that the ranks drift apart. Make them part of the model "
            "before it is wrapped."
        )
    if wide is not None and sync == "last":
        raise ConfigError(
            "accum_dtype and master_weights sum what every micro-batch leaves in .grad, but over ranks only the last "
            "one's would be reduced. Set sync='every', or keep parameters in float32 and set precision='bf16'; with "
            "fully_shard, MixedPrecisionPolicy(reduce_dtype=torch.float32) sums in float32."
        )


def require_visible(model: nn.Module, observer: object) -> None:
    """Refuse to observe gradients that never exist by parameter."""
    if observer is not None and is_sharded(model):
        raise ConfigError(
            f"observer={type(observer).__name__} looks at the parameters' gradients of every micro-batch, but "
            "fully_shard computes them on copies of its own, so nothing would be seen. Measure with "
            "DistributedDataParallel or on one process; the noise scale does not depend on it."
        )


def warn_of_one_alone(model: nn.Module) -> None:
    """Warn where several ranks would each train a model of their own."""
    if several_ranks() and data_parallel(model) is None and not is_sharded(model):
        warnings.warn(
            f"this is one of {dist.get_world_size()} ranks, but the model is spread over none, so nothing reduces its "
            "gradients and every rank trains a model of its own. Wrap it in DistributedDataParallel, or apply "
            "fully_shard, before the optimizer is built.",
            PreflightWarning,
            stacklevel=4,  # at the caller of Accumulator
        )


def warn_of_batch_norm(model: nn.Module) -> None:
    """Warn where every rank would keep running statistics of its own."""
    ddp = data_parallel(model)
    for name, module in (uncompiled(model) if ddp is None else ddp.module).named_modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.track_running_stats:
            fate = (
                "rank 0's replace the others' in the first forward pass after a reduction, and in between they differ"
                if ddp is not None and ddp.broadcast_buffers
                else "the ranks' drift apart and nothing brings them together"
            )
            warnings.warn(
                f"{_named(name)} is a {type(module).__name__}, whose running statistics see one rank's samples only: "
                f"{fate}. Use nn.SyncBatchNorm.convert_sync_batchnorm (CUDA), or a norm without running statistics; "
                "or validate and save on rank 0 only.",
                PreflightWarning,
                stacklevel=4,  # at the caller of Accumulator
            )
            return


def _named(name: str) -> str:
    return f"the model's module {name!r}" if name else "the model"

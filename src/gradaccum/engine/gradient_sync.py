"""The one place that knows how a model is told when to reduce its gradients over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradaccum.engine.traffic import traffic_of
from gradaccum.engine.wrapping import data_parallel, is_sharded, shard_groups, uncompiled
from gradaccum.errors import ConfigError

_NOTHING_TO_REDUCE = nullcontext()


def gradient_sync(model: nn.Module, *, enabled: bool, keep_gathered: bool = False) -> AbstractContextManager[None]:
    """Run forward *and* backward of one micro-batch with gradient sync on or off.

    DDP decides in the forward pass whether the backward pass reduces, FSDP2 in the backward pass; so both belong
    inside. On one process there is nothing to reduce, and this changes nothing.

    Args:
        model: plain, wrapped in DistributedDataParallel, or sharded with fully_shard.
        enabled: whether this backward pass reduces gradients over ranks.
        keep_gathered: FSDP2's parameters stay whole from a pass without sync to the next: fewer gathers, for the memory
            of all parameters.
    """
    return syncing(model, keep_gathered=keep_gathered)(enabled)


def syncing(model: nn.Module, *, keep_gathered: bool) -> Callable[[bool], AbstractContextManager[None]]:
    """`gradient_sync` of one model, as a function of `enabled`: how the model is spread is asked only once."""
    if (ddp := data_parallel(model)) is not None:
        return lambda enabled: _reducing_all(ddp) if enabled else ddp.no_sync()
    if is_sharded(model):
        inner = uncompiled(model)
        return lambda enabled: _sharded_sync(inner, enabled=enabled, reshard=enabled or not keep_gathered)
    return lambda _: _NOTHING_TO_REDUCE


def forget(model: nn.Module) -> None:
    """Drop what passes without sync left inside a sharded model, after a window that failed."""
    if is_sharded(model):
        uncompiled(model).reset_iter_state()  # type: ignore[operator]
        for parameter in chain.from_iterable(group.fsdp_params for group in shard_groups(model)):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


@contextmanager
def _sharded_sync(model: Any, *, enabled: bool, reshard: bool) -> Iterator[None]:
    """`set_is_last_backward` is for schedules in which passes overlap; here it would gather some parameters in vain."""
    model.set_requires_gradient_sync(enabled)
    model.set_reshard_after_backward(reshard)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)


@contextmanager
def _reducing_all(ddp: DistributedDataParallel) -> Iterator[None]:
    """See that a pass which should reduce did: with a parameter unused, DDP waits for it and reduces nothing."""
    _require_free(ddp)
    traffic = traffic_of(ddp)
    traffic.complete = False
    yield
    if not traffic.complete:
        raise ConfigError(
            "DistributedDataParallel did not reduce the window's gradient, because some trainable parameter was not "
            "used in its last micro-batch, and the ranks would now step apart. Build it with "
            "find_unused_parameters=True, or freeze the parameter before wrapping."
        )
    for name, parameter in ddp.module.named_parameters():
        if parameter.grad is not None and parameter not in traffic.reduced:
            raise ConfigError(
                f"parameter {name!r} has a gradient that DistributedDataParallel does not reduce, because it was "
                "frozen when it was wrapped, or is told to be ignored, and the ranks would now step apart. Wrap the "
                "model again after unfreezing, or freeze the parameter."
            )


def _require_free(ddp: DistributedDataParallel) -> None:
    """Refuse a step inside what tells DDP otherwise."""
    if not ddp.require_backward_grad_sync:
        raise ConfigError(
            "step() was called inside the model's no_sync(), so the window's gradient would not be reduced. Leave "
            "no_sync() to the engine, which enters it on every micro-batch but the last."
        )
    if ddp._join_config.enable:
        raise ConfigError(
            "step() was called inside the model's join(), which does not know the engine's exchanges, so ranks would "
            "wait for each other in vain. Leave join() out: `windows` keeps ranks whose data ends earlier in step."
        )

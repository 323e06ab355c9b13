"""Collectives of a model's gradients and parameters, counted where they are issued."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gradaccum.engine.wrapping import data_parallel, is_sharded, shard_groups
from gradaccum.errors import ConfigError

ORDERS = 2**52
"""Numbers that a float64 holds exactly."""


@dataclass(slots=True)
class Traffic:
    """What this rank issued in a window.

    Attributes:
        sync_calls: backward passes run with gradient sync enabled, on one process too.
        reductions: gradient collectives: all-reduces of DDP's buckets, or FSDP2's reduce-scatters, and all-reduces of
            shards where they have replicas.
        reduced_bytes: bytes of gradients that it gave to them.
        gathered_bytes: bytes of whole parameters that FSDP2 gathered.
        order: a number made from the order in which FSDP2 gathered and reduced its groups, to compare ranks by.
        complete: whether DDP reduced its last bucket since this was last unset; the buckets go in order.
        reduced: the parameters in DDP's buckets, which are those that were trainable when it was built.
    """

    sync_calls: int = 0
    reductions: int = 0
    reduced_bytes: int = 0
    gathered_bytes: int = 0
    order: int = 0
    complete: bool = True
    reduced: set[Tensor] = field(default_factory=set)

    def reduce(self, gradient: Tensor) -> None:
        self.reductions += 1
        self.reduced_bytes += gradient.nbytes

    def note(self, group: int) -> None:
        self.order = (31 * self.order + group + 1) % ORDERS

    def begin_window(self) -> None:
        """Count from 0 again; the order goes on."""
        self.sync_calls = self.reductions = self.reduced_bytes = self.gathered_bytes = 0


def traffic_of(model: nn.Module) -> Traffic:
    """The model's counts, which go on from when this is first called for it; on one process there are no collectives.

    Raises:
        ConfigError: DDP has a communication hook that does not count.
    """
    if (ddp := data_parallel(model)) is not None:
        return _of_ddp(ddp)
    return _of_shards(model) if is_sharded(model) else Traffic()


def counted(hook: Callable[[Any, GradBucket], Any]) -> Callable[[Any, GradBucket], Any]:
    """A DDP communication hook that also counts: `model.register_comm_hook(state, counted(fp16_compress_hook))`.

    Bytes are those of the gradients before the hook changes them.
    """
    traffic = Traffic()

    @wraps(hook)
    def counting(state: Any, bucket: GradBucket) -> Any:
        traffic.reduce(bucket.buffer())
        traffic.reduced.update(bucket.parameters())
        traffic.complete |= bucket.is_last()
        return hook(state, bucket)

    cast(Any, counting).traffic = traffic
    return counting


def _of_ddp(ddp: DistributedDataParallel) -> Traffic:
    if not ddp._comm_hooks:
        ddp.register_comm_hook(ddp.process_group, counted(allreduce_hook))
    (hook, _), *_ = ddp._comm_hooks
    if not isinstance(traffic := getattr(hook, "traffic", None), Traffic):
        raise ConfigError(
            f"the model has the communication hook {hook.__name__}, whose reductions would not be counted, and DDP "
            "takes only one. Register it as counted(hook), from gradaccum (and leave out DDP's mixed_precision, which "
            "registers one of its own: set precision='bf16')."
        )
    return traffic


def _of_shards(model: nn.Module) -> Traffic:
    groups = shard_groups(model)
    traffic = next((each._reduce_scatter_comm.traffic for each in groups if _counts(each)), None) or Traffic()
    for number, group in enumerate(groups):
        if not _counts(group):
            group._reduce_scatter_comm = _Reducing(group._reduce_scatter_comm, traffic, number)
            group._all_gather_comm = _Gathering(group._all_gather_comm, traffic, number)
            if group._is_hsdp:
                group._all_reduce_hook = _after_all_reduce(group._all_reduce_hook, traffic)
    return traffic


def _counts(group: Any) -> bool:
    return isinstance(group._reduce_scatter_comm, _Reducing)


class _Counting:
    """An FSDP2 communication method that counts and leaves the rest to the one that was set."""

    def __init__(self, inner: Any, traffic: Traffic, group: int) -> None:
        self.inner, self.traffic, self.group = inner, traffic, group

    def allocate(self, *args: Any, **options: Any) -> Any:
        return self.inner.allocate(*args, **options)


class _Reducing(_Counting):
    def __call__(self, output_tensor: Any, input_tensor: Any, *args: Any, **options: Any) -> Any:
        self.traffic.reduce(input_tensor)
        self.traffic.note(self.group)
        return self.inner(output_tensor, input_tensor, *args, **options)


class _Gathering(_Counting):
    def __call__(self, output_tensor: Any, input_tensor: Any, *args: Any, **options: Any) -> Any:
        self.traffic.gathered_bytes += output_tensor.nbytes
        self.traffic.note(self.group)
        return self.inner(output_tensor, input_tensor, *args, **options)


def _after_all_reduce(inner: Callable[[Tensor], None] | None, traffic: Traffic) -> Callable[[Tensor], None]:
    """Counts the all-reduce of a shard's replicas, which FSDP2 issues itself, in the hook that it calls after each."""

    def counting(reduced: Tensor) -> None:
        traffic.reduce(reduced)
        if inner is not None:
            inner(reduced)

    return counting

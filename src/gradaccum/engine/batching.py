"""Batches, micro-batches and windows: how samples are cut before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from typing import Any, Literal

import torch
from torch import Tensor

from gradaccum.engine.exchange import exchange, several_ranks
from gradaccum.errors import BatchError, ConfigError

Batch = Any
"""A tensor, or a tuple, list or dict of batches; dim 0 of every tensor is the sample."""


@dataclass(frozen=True)
class BatchPlan:
    """How an effective batch is reached: `effective_batch = micro_batch * accum_steps * world_size`.

    Args:
        effective_batch: samples per optimizer step, over all ranks.
        micro_batch: samples of one forward pass on one rank.
        world_size: data-parallel ranks.

    Raises:
        ConfigError: a size is not a positive integer, or the effective batch is no multiple of the other two.
    """

    effective_batch: int
    micro_batch: int
    world_size: int = 1

    def __post_init__(self) -> None:
        for name in ("effective_batch", "micro_batch", "world_size"):
            require_positive_int(name, getattr(self, name))
        effective, micro, world = self.effective_batch, self.micro_batch, self.world_size
        if micro * world > effective:
            raise ConfigError(
                f"effective_batch={effective} is smaller than micro_batch={micro} x world_size={world} = "
                f"{micro * world}, so one micro-batch on each rank already exceeds it. "
                f"Lower micro_batch to at most {effective // world} or raise effective_batch to {micro * world}."
                if effective >= world
                else f"effective_batch={effective} is smaller than world_size={world}, so some ranks would have no "
                f"sample. Raise effective_batch to at least {world} or use fewer ranks."
            )
        if effective % (micro * world):
            raise ConfigError(
                f"effective_batch={effective} is not a multiple of micro_batch={micro} x world_size={world} = "
                f"{micro * world}, so the ranks would step on unequal batches. "
                f"Set it to a multiple of {micro * world}, such as {nearest_multiple(effective, micro * world)}."
            )

    @property
    def accum_steps(self) -> int:
        """Backward passes per optimizer step, per rank."""
        return self.effective_batch // (self.micro_batch * self.world_size)


def require_positive_int(name: str, value: object) -> None:
    """Refuse what is not a positive integer; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} is not an integer. Set it to a whole number of at least 1.")
    if value < 1:
        raise ConfigError(
            f"{name}={value} is not positive, so there would be nothing to step on. Set it to at least 1."
        )


def nearest_multiple(value: int, of: int) -> int:
    """The positive multiple of `of` that lies nearest to `value`."""
    return max(1, round(value / of)) * of


def windows(
    loader: Iterable[Batch], accum_steps: int, *, drop_last: bool = False, ranks: Literal["all", "own"] = "all"
) -> Iterator[list[Batch]]:
    """Group a loader's micro-batches into windows of `accum_steps`; the last may be shorter.

    At most one window is held. The loader is read only as far as the window that is asked for. Over several ranks all
    yield equally many windows: a rank whose loader ends earlier yields empty ones, in which `Accumulator.step` takes
    part with nothing to add, until all have ended. So all ranks must go through it together.

    Args:
        loader: yields micro-batches; needs no length.
        accum_steps: micro-batches a window.
        drop_last: leave out a last window that is shorter than `accum_steps`.
        ranks: `own` ends with this rank's loader, and may be gone through by it alone.
    """
    require_positive_int("accum_steps", accum_steps)
    if ranks not in ("all", "own"):
        raise ConfigError(f"ranks={ranks!r} is unknown. Set it to 'all' (ranks go together) or 'own'.")
    together = ranks == "all" and several_ranks()
    return _windows(iter(loader), accum_steps, drop_last, together)


def _windows(
    micro_batches: Iterator[Batch], accum_steps: int, drop_last: bool, together: bool
) -> Iterator[list[Batch]]:
    while True:
        window = list(islice(micro_batches, accum_steps))
        if drop_last and len(window) < accum_steps:
            window = []
        if not (_any_rank_has(window) if together else window):
            return
        yield window
        del window  # or it would be held while the next one is read


def _any_rank_has(window: Sequence[Batch]) -> bool:
    return bool(exchange(torch.tensor([len(window)])).any())


def split(batch: Batch, micro_batch: int | Sequence[int]) -> list[Batch]:
    """Cut a batch along dim 0 into micro-batches; the last may be smaller.

    Args:
        batch: a tensor, or a tuple, list or dict of those, however deep; every tensor has the same dim 0.
        micro_batch: samples a micro-batch, or the size of each one (`[5, 4, 3, 4]`, an uneven cut).

    Returns:
        Micro-batches of the batch's own structure; tensors are views.

    Raises:
        BatchError: no tensor, unequal or missing dim 0, something that cannot be cut, or sizes that do not add up.
    """
    samples = batch_size(batch)
    if isinstance(micro_batch, int):
        require_positive_int("micro_batch", micro_batch)
        sizes = [min(micro_batch, samples - start) for start in range(0, samples, micro_batch)]
    else:
        sizes = list(micro_batch)
        for size in sizes:
            require_positive_int("a micro-batch's size", size)
        if sum(sizes) != samples:
            raise BatchError(
                f"the cut {sizes} adds up to {sum(sizes)}, but the batch has {samples} samples, so some would be lost "
                f"or invented. Give sizes that add up to {samples}."
            )
    starts = accumulate(sizes, initial=0)
    return [map_tensors(batch, partial(_rows, start, size)) for start, size in zip(starts, sizes, strict=False)]


def _rows(start: int, size: int, tensor: Tensor) -> Tensor:
    return tensor[start : start + size]


def batch_size(batch: Batch) -> int:
    """Samples in a batch: dim 0, which all its tensors share."""
    lengths = {tensor.size(0) if tensor.dim() else None for tensor in tensors_of(batch)}
    if not lengths:
        raise BatchError("the batch holds no tensor, so its samples cannot be counted. Put its data in tensors.")
    if None in lengths:
        raise BatchError("the batch holds a tensor of no dimensions, which has no samples. Give every tensor a dim 0.")
    if len(lengths) > 1:
        raise BatchError(
            f"the batch's tensors have {sorted(length for length in lengths if length is not None)} samples in dim 0, "
            "so a cut would pair the wrong ones. Give all of them the same dim 0."
        )
    (length,) = lengths
    assert length is not None
    return length


def samples_in(micro_batch: Batch) -> int:
    """Samples in a micro-batch that is not to be cut: dim 0 of its first tensor; what else it holds is its own."""
    if isinstance(micro_batch, Tensor) and micro_batch.dim():
        return micro_batch.size(0)
    if isinstance(micro_batch, tuple | list) and micro_batch:
        return samples_in(micro_batch[0])
    if isinstance(micro_batch, dict) and micro_batch:
        return samples_in(next(iter(micro_batch.values())))
    return batch_size(micro_batch)  # which says what is wrong


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """Every tensor of a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
        return
    if not isinstance(batch, dict | tuple | list):
        raise _unknown(batch)
    for item in batch.values() if isinstance(batch, dict) else batch:
        yield from tensors_of(item)


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The same structure with every tensor changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return type(batch)((key, map_tensors(value, change)) for key, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple takes its fields one by one
        return type(batch)(*(map_tensors(item, change) for item in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_tensors(item, change) for item in batch)
    raise _unknown(batch)


def _unknown(batch: Batch) -> BatchError:
    return BatchError(
        f"a batch may hold tensors and tuples, lists or dicts of them, but this one holds a {type(batch).__name__}, "
        "and how to cut that is unknown. Turn it into a tensor, or leave it out of the batch."
    )


def to(batch: Batch, device: torch.device, dtype: torch.dtype | None = None) -> Batch:
    """The batch on a device; floating-point tensors also in `dtype` where one is given."""
    return map_tensors(
        batch, lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)
    )

"""Batches, micro-batches and windows: how samples are cut before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from operator import index
from typing import Any, Literal, SupportsIndex

import torch
from torch import Tensor

from gradaccum.engine.exchange import exchange, several_ranks
from gradaccum.engine.structure import leaves, map_tensors, tensors_of
from gradaccum.errors import BatchError, ConfigError

Batch = Any
"""A tensor, None, or a tuple, list, mapping or dataclass of batches; dim 0 of every tensor is the sample."""


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
            object.__setattr__(self, name, positive_int(name, getattr(self, name)))
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


def positive_int(name: str, value: Any) -> int:
    """The value as a plain integer of at least 1, which it must be; numpy's integers are, a bool is none."""
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is not an integer. Set it to a whole number of at least 1.")
    if number < 1:
        raise ConfigError(
            f"{name}={number} is not positive, so there would be nothing to step on. Set it to at least 1."
        )
    return number


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
    accum_steps = positive_int("accum_steps", accum_steps)
    if ranks not in ("all", "own"):
        raise ConfigError(f"ranks={ranks!r} is unknown. Set it to 'all' (ranks go together) or 'own'.")
    together = ranks == "all" and several_ranks()
    return _windows(iter(loader), accum_steps, drop_last=drop_last, together=together)


def _windows(
    micro_batches: Iterator[Batch], accum_steps: int, *, drop_last: bool, together: bool
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


def split(batch: Batch, micro_batch: SupportsIndex | Iterable[SupportsIndex]) -> list[Batch]:
    """Cut a batch along dim 0 into micro-batches; the last may be smaller.

    Args:
        batch: a tensor, or a tuple, list, mapping or dataclass of those, however deep; every tensor has the same dim 0.
            None stays None in every micro-batch.
        micro_batch: samples a micro-batch, or the size of each one (`[5, 4, 3, 4]`, an uneven cut).

    Returns:
        Micro-batches of the batch's own structure; tensors are views.

    Raises:
        BatchError: no tensor, unequal or missing dim 0, something that cannot be cut, or sizes that do not add up.
        ConfigError: a size that is no positive integer.
    """
    samples = require_samples(batch)
    sizes = _sizes(micro_batch, samples)
    if sum(sizes) != samples:
        raise BatchError(
            f"the cut {sizes} adds up to {sum(sizes)}, but the batch has {samples} samples, so some would be lost "
            f"or invented. Give sizes that add up to {samples}."
        )
    starts = accumulate(sizes, initial=0)
    return [map_tensors(batch, partial(_rows, start, size)) for start, size in zip(starts, sizes, strict=False)]


def _sizes(micro_batch: Any, samples: int) -> list[int]:
    if isinstance(micro_batch, Iterable) and not isinstance(micro_batch, str) and getattr(micro_batch, "ndim", 1) != 0:
        return [positive_int("a micro-batch's size", size) for size in micro_batch]
    size = positive_int("micro_batch", micro_batch)
    return [min(size, samples - start) for start in range(0, samples, size)]


def _rows(start: int, size: int, tensor: Tensor) -> Tensor:
    return tensor[start : start + size]


def require_samples(batch: Batch) -> int:
    """Samples in a batch that is to be stepped on, at least 1."""
    samples = batch_size(batch)
    if not samples:
        raise BatchError("the batch has 0 samples, so there is no gradient to step on. Leave empty batches out.")
    return samples


def batch_size(batch: Batch) -> int:
    """Samples in a batch: dim 0, which all its tensors share."""
    lengths = {_rows_in(tensor) for tensor in tensors_of(batch)}
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


def _rows_in(tensor: Tensor) -> int | None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise BatchError(
            f"the batch holds a {'nested' if tensor.is_nested else tensor.layout} tensor, which has no rows to cut. "
            "Give dense tensors (padded, with a mask), or lists of micro-batches made by a loader."
        )
    return tensor.size(0) if tensor.dim() else None


def samples_in(micro_batch: Batch) -> int:
    """Samples in a micro-batch that is not to be cut: dim 0 of its first tensor that has one; the rest is its own.

    What shows no tensor (an object of the user's) is one sample, unless it tells its length.
    """
    first = micro_batch
    if type(micro_batch) in (tuple, list) and micro_batch:
        first = micro_batch[0]
    elif type(micro_batch) is dict and micro_batch:
        first = next(iter(micro_batch.values()))
    if isinstance(first, Tensor) and first.dim():  # the usual batch; a walk through everything costs several times more
        return first.size(0)
    samples = (leaf.size(0) for leaf in leaves(micro_batch) if isinstance(leaf, Tensor) and leaf.dim())
    return next(samples, len(micro_batch) if isinstance(micro_batch, Sized) else 1)


def require_window(window: Any) -> None:
    """Refuse what is no list of micro-batches: going through it would cost it, or find something else in it."""
    if isinstance(window, (list, tuple)):  # asked each window, in which making a union of types would cost more
        return
    if isinstance(window, Tensor | Mapping | str) or not isinstance(window, Sequence):
        raise BatchError(
            f"the window is a {type(window).__name__}, not a list of micro-batches, so what it holds would be taken "
            "for them, or used up by counting. Give a list: split(batch, micro_batch), what windows() yields, or "
            "list(micro_batches)."
        )


def to(batch: Batch, device: torch.device, dtype: torch.dtype | None = None) -> Batch:
    """The batch on a device; floating-point tensors also in `dtype` where one is given."""
    return map_tensors(
        batch, lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)
    )

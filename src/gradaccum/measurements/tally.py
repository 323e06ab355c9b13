"""Counting the bytes of live tensors, by what they are for; works on real tensors and on fake ones alike."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

Kind = Literal["parameters", "gradients", "optimizer_state", "inputs", "activations", "temporaries"]
KINDS: tuple[Kind, ...] = get_args(Kind)

CUDA_BLOCK = 512
"""CUDA's caching allocator rounds every allocation up to a multiple of this."""


@dataclass
class Storage:
    """One live storage; what it is for may become clear only after it was made."""

    size: int
    kind: Kind


@dataclass(frozen=True)
class Peak:
    """The most bytes that were live at once, by kind (parameters include buffers)."""

    by_kind: Mapping[Kind, int]

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


class OneForEveryNumber(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers 1 where a number is read out of a tensor: on fake tensors, which have none, the program goes on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


class Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every storage that comes out of an operation while the mode is on, each counted once, until it is freed.

    What a kernel allocates for itself and frees before it returns is not seen.
    """

    def __init__(self, block: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.block = block
        self.live: dict[int, Storage] = {}
        self.total = 0
        self.reset_peak()

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.highest = self.total
        self._at_peak: Sequence[Storage] | None = None

    def peak(self) -> Peak:
        """The peak since the last reset, by what its storages turned out to be for."""
        at_peak = self.live.values() if self._at_peak is None else self._at_peak
        sizes: Counter[Kind] = Counter(dict.fromkeys(KINDS, 0))
        for storage in at_peak:
            sizes[storage.kind] += storage.size
        return Peak(dict(sizes))

    def label(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        for tensor in tensors:
            storage = self.live.get(id(tensor.untyped_storage()))
            if storage is not None:
                storage.kind = kind

    def relabel(self, before: Kind, after: Kind) -> None:
        for storage in self.live.values():
            if storage.kind == before:
                storage.kind = after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_iter(out):
            if isinstance(each, Tensor):
                self._note(each.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self.live:
            return
        size = -(-storage.nbytes() // self.block) * self.block
        self.live[key] = Storage(size, "temporaries")
        self.total += size
        if self.total > self.highest:
            self.highest, self._at_peak = self.total, None
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        if self._at_peak is None and self.total == self.highest:
            self._at_peak = list(self.live.values())
        self.total -= self.live.pop(key).size

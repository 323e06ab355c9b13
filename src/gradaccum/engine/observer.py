"""The seam through which someone may look at a window's gradients while they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

Note = Callable[[float, float], None]
"""Called after each backward pass with the micro-batch's targets, and what its loss sum was multiplied by."""


class Observer(Protocol):
    """Looks at gradients, and changes none."""

    def watch(self, parameters: Sequence[nn.Parameter], *, micro_batches: int) -> AbstractContextManager[Note]:
        """Around the backward passes of one window."""

    def finish(self, grad_norm: Tensor, count: float) -> None:
        """Once a window, before clipping: the norm of its gradient, and its targets, over all ranks."""

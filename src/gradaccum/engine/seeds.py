"""What backward starts from: as its seed, a micro-batch's share scales the loss without a division node."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Seeds:
    """Scalars that hold the shares of a window's terms; windows of as many targets start from the same ones."""

    def __init__(self) -> None:
        self._made_for: list[tuple[float, torch.dtype, torch.device]] = []
        self._made: list[Tensor] = []

    def of(self, sums: Sequence[Tensor], shares: Sequence[float]) -> list[Tensor]:
        """One for each loss sum, of its type and on its device."""
        wanted = [(share, loss_sum.dtype, loss_sum.device) for loss_sum, share in zip(sums, shares, strict=True)]
        if wanted != self._made_for:
            self._made = [torch.full((), share, dtype=dtype, device=device) for share, dtype, device in wanted]
            self._made_for = wanted
        return self._made

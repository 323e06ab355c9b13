"""A model's buffers, kept so that a pass which is not to count leaves them as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


class Buffers:
    """Copies of the buffers as they are now.

    Args:
        modules: whose buffers a forward pass may change in place, replace, or make.
        copied: how a copy is made, where memory for it is to be taken elsewhere.
    """

    def __init__(self, modules: Iterable[nn.Module], copied: Callable[[Tensor], Tensor] = torch.clone) -> None:
        self._held = [
            (module, name, buffer, None if buffer is None else copied(buffer.detach()))
            for module in modules
            for name, buffer in module._buffers.items()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the same tensors back, with their values; one that has them is not written to, as some cannot be.

        (Buffers that are views of one element, or were made in inference mode, refuse it; nor does a forward pass
        change them.)
        """
        for module, name, buffer, value in self._held:
            module._buffers[name] = buffer
            if buffer is not None and value is not None and not torch.equal(buffer, value.to(buffer.device)):
                buffer.copy_(value)

"""Where a loop or a model computes in fewer digits than it is judged by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MATCH = 1e-9
"""In float64, relative: right and wrong are apart by far more."""

MATCH_IN_FLOAT32 = 1e-5
"""The same, where part of it is computed in float32."""


class Narrowing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices every tensor that is cast from float64 to float32 (`logits.float()`); a mere scalar may be a log's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dim() and args[0].dtype == torch.float64:
            self.found |= isinstance(result, Tensor) and result.dtype == torch.float32
        return result

    def during(self, compute: Callable[[], Any]) -> Any:
        """What it computes, watched."""
        with self:
            return compute()

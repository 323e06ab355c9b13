"""Whole-gradient arithmetic in a few kernels. The only user of torch's `_foreach_` functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def clear(parameters: Sequence[nn.Parameter]) -> None:
    """Set every gradient to None (by hand: `optimizer.zero_grad()` costs several times as much)."""
    for parameter in parameters:
        parameter.grad = None


def gradients_of(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The gradients that are there, in the parameters' order."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norm over all gradients together, a scalar; 0 where there is none."""
    if not gradients:
        return torch.zeros(())
    norms: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))
    return norms


def clip(gradients: Sequence[Tensor], norm: Tensor, clip_norm: float) -> None:
    """Scale gradients in place so that their global norm is at most `clip_norm`.

    The factor is that of `torch.nn.utils.clip_grad_norm_`: `min(1, clip_norm / (norm + 1e-6))`.
    """
    if gradients:
        torch._foreach_mul_(list(gradients), (clip_norm / (norm + 1e-6)).clamp(max=1.0))

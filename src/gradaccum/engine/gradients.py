"""Whole-gradient arithmetic in few and cheap calls. The only user of torch's operators by their own names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.linalg import vector_norm

from gradaccum.errors import BatchError

HALF = frozenset({torch.bfloat16, torch.float16})


def backwards(operators: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`torch.autograd.backward` of one loss, and of several, without its checks in Python where torch has that.

    Those take up to 6 % of a small pass. The operators came with TorchScript, and may leave torch with it.
    """
    try:
        return operators.backward.default, operators.backward.TensorList
    except AttributeError:
        return torch.autograd.backward, torch.autograd.backward


_backward_of_one, _backward_of_several = backwards(torch.ops.aten)


def seeds(losses: Sequence[Tensor], shares: Sequence[float], *, passes: int) -> list[Sequence[Tensor]]:
    """What each loss's backward passes start from, `[pass][loss]`: its share, which needs no division node then.

    Every pass has an element of its own: a parameter that a loss only views takes its seed for its gradient.

    Raises:
        BatchError: a share is too large for its loss's type.
    """
    try:
        if passes == 1:
            return [tuple(map(Tensor.new_full, losses, repeat(()), shares))]
        of_loss = [loss.new_full((passes,), share).unbind() for loss, share in zip(losses, shares, strict=True)]
        return list(zip(*of_loss, strict=True))
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise BatchError(
            f"the window's targets are so few ({' and '.join(f'{share:.3g}' for share in shares)} is what its loss "
            f"sums would be multiplied by) that {losses[0].dtype} ends before. Count targets in units of about 1."
        ) from error


def backward(losses: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
    """Accumulate into `.grad`, starting each loss's pass from its seed, as `torch.autograd.backward` does."""
    if is_dynamo_compiling():  # which leaves its graph for torch.autograd.backward alone
        torch.autograd.backward(losses, seeds)
    elif len(losses) == 1:
        _backward_of_one(losses[0], seeds[0])
    else:
        _backward_of_several(losses, seeds)


def number(value: float, like: Tensor) -> Tensor:
    """A scalar of a tensor's type and device; infinite where the type ends before the value."""
    try:
        return like.new_full((), value)
    except RuntimeError:  # "value cannot be converted to type float without overflow"
        return like.new_full((), math.copysign(math.inf, value))


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients that are there, in the parameters' order."""
    return [gradient for parameter in parameters if (gradient := parameter.grad) is not None]


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norm over all gradients together, a scalar of at least float32; 0 where there is none."""
    if not gradients:
        return torch.zeros(())
    return _read_norm(gradients) if gradients[0].is_cpu else _unread_norm(gradients)


def _read_norm(gradients: Sequence[Tensor]) -> Tensor:
    """On the CPU, where foreach goes one by one too, and reading a number waits for nothing."""
    norms: list[Tensor] = [
        vector_norm(each, dtype=torch.float32) if each.dtype in HALF else vector_norm(each) for each in gradients
    ]
    widest = norms[0] if norms[0].dtype is norms[-1].dtype else max(norms, key=Tensor.element_size)
    return number(math.hypot(*map(Tensor.item, norms)), widest)


def _unread_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Elsewhere: a few kernels, for which nothing waits."""
    dtypes = {gradient.dtype for gradient in gradients}
    widest = torch.float64 if torch.float64 in dtypes else torch.float32
    norms = torch._foreach_norm(list(gradients), 2, None if HALF.isdisjoint(dtypes) else widest)
    here = norms[0].device  # of a model spread over devices, the others' follow
    norm: Tensor = vector_norm(torch.stack([each.to(here) for each in norms]))
    return norm


def scale(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply gradients in place."""
    if gradients:
        torch._foreach_mul_(list(gradients), factor)


def clip(gradients: Sequence[Tensor], norm: Tensor, clip_norm: float) -> None:
    """Scale gradients in place so that their global norm is at most `clip_norm`.

    The factor is that of `torch.nn.utils.clip_grad_norm_`: `min(1, clip_norm / (norm + 1e-6))`.
    """
    factor = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, there in by_device.items():
        torch._foreach_mul_(there, factor.to(device))


def add(sums: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add gradients to sums of a wider type, in place."""
    if sums:
        torch._foreach_add_(list(sums), list(gradients))


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into others of their shapes, rounding to the targets' types."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))

"""The one place that knows how a model reduces its gradients over ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradaccum.errors import ConfigError

_NOTHING_TO_REDUCE = nullcontext()


def gradient_sync(model: nn.Module, *, enabled: bool) -> AbstractContextManager[None]:
    """Run forward *and* backward of one micro-batch with gradient sync on or off.

    On one process there is nothing to reduce, and this changes nothing.
    """
    refuse_wrapped(model)
    del enabled
    return _NOTHING_TO_REDUCE


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model whose wrapper would average gradients over ranks behind the engine's back."""
    if isinstance(model, DistributedDataParallel):
        raise ConfigError(
            "the model is wrapped in DistributedDataParallel, which averages gradients over ranks, so the window's "
            "gradient would be divided twice. Pass the module itself and run one process."
        )

"""What cannot be right is refused when it is built, or warned of where it depends."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from inspect import Parameter, signature
from numbers import Real
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gradaccum.engine.gradients import HALF
from gradaccum.engine.objective import Objective
from gradaccum.engine.observer import Observer
from gradaccum.engine.precision import Precision, trainable
from gradaccum.errors import BatchError, ConfigError, PreflightWarning

NO_GRADIENT = "does not require grad and does not have a grad_fn"
"""How torch's error reads where a loss depends on nothing that is trained."""


def require_parts(model: object, optimizer: object, objective: object) -> None:
    """Refuse what is of another kind than it should be, before it fails in words of its own."""
    for name, part, kind in (
        ("model", model, nn.Module),
        ("optimizer", optimizer, Optimizer),
        ("objective", objective, Objective),
    ):
        if not isinstance(part, kind):
            raise ConfigError(
                f"{name} is a {type(part).__name__}, not {_a(kind.__name__)}. Give Accumulator(model, optimizer, "
                "objective, ...) in this order; a plain loss function becomes Objective(loss_sum=..., count=...)."
            )


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIOU' else 'a'} {noun}"


def require_options(*, sync: str, clip_norm: float | None, after_step: object) -> None:
    if sync not in ("last", "every"):
        raise ConfigError(f"sync={sync!r} is unknown. Set it to 'last' (one reduction a window) or 'every'.")
    if not isinstance(after_step, Iterable) or not all(map(callable, after_step)):
        raise ConfigError("after_step is no list of functions. Give [function], each taking the model.")
    if clip_norm is None:
        return
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, Real):
        raise ConfigError(f"clip_norm={clip_norm!r} is not a number. Set it to a number above 0, or to None.")
    if not clip_norm > 0:
        raise ConfigError(
            f"clip_norm={clip_norm} would erase or turn round every gradient. Set it above 0, or to None."
        )


def require_model(model: nn.Module) -> None:
    """Refuse a model whose gradients cannot be accumulated."""
    for name, module in model.named_modules():
        if _replays_cuda_graphs(module):
            raise ConfigError(
                f"{_named(name)} is compiled with CUDA graphs (mode='reduce-overhead' or 'max-autotune'), which reuse "
                "the memory of one micro-batch for the next while its gradients and loss are still needed. "
                "Compile it with the default mode, or with options={'triton.cudagraphs': False}."
            )
        if getattr(module, "sparse", False) is True:
            raise ConfigError(
                f"{_named(name)} makes sparse gradients, whose norm and clip are not defined here. Build it with "
                "sparse=False."
            )
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"the model's parameter {name!r} has a post-accumulate-grad hook, which runs after every micro-batch's "
                "backward pass: an optimizer that steps in it would step on parts of the window's gradient. Remove it, "
                "and step through the Accumulator; to look at gradients, use observer= or Tensor.register_hook."
            )


def require_optimizer(optimizer: Optimizer, model: nn.Module, *, master_weights: Sequence[nn.Parameter] | None) -> None:
    """Refuse an optimizer that would not change the model."""
    if _needs_closure(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} evaluates the loss several times a step through a closure, but a window's "
            "gradient is computed once. Use an optimizer that steps on a given gradient, such as SGD or AdamW."
        )
    stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if not stepped.intersection(trainable(model) if master_weights is None else master_weights):
        raise ConfigError(
            "the optimizer steps none of the model's trainable parameters (or of its master weights, where there are "
            "any), so no window would change the model. Build the optimizer from them, after the last change to the "
            "model."
        )


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is Parameter.empty


def require_scheduler(scheduler: LRScheduler | None, optimizer: Optimizer) -> None:
    """Refuse a scheduler that one tick a window does not drive."""
    if scheduler is None:
        return
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau steps on a validation metric, which a window does not have. Call its step(metric) "
            "yourself after each validation, and leave scheduler=None."
        )
    if not isinstance(scheduler, LRScheduler):
        raise ConfigError(
            f"scheduler is a {type(scheduler).__name__}, not a torch LRScheduler. Chain several with "
            "torch.optim.lr_scheduler.ChainedScheduler or SequentialLR."
        )
    if scheduler.optimizer is not optimizer:
        raise ConfigError(
            "the scheduler belongs to another optimizer, so this one's learning rate would never change. "
            "Build the scheduler from the optimizer given here."
        )


def require_observer(observer: Observer | None, objective: Objective) -> None:
    """Refuse what cannot observe, and to observe a gradient that is a sum of means over different counts."""
    if observer is not None and (isinstance(observer, type) or not hasattr(observer, "watch")):
        raise ConfigError(f"observer={observer!r} has no watch(...). Give one such as NoiseScale().")
    if observer is not None and objective.weights is not None:
        raise ConfigError(
            f"the objective has the terms {', '.join(objective.weights)}, each with a count and weight of its own, so "
            "a micro-batch's gradient is no mean over one number of targets, which is what an observer is told. Leave "
            "the observer out, or give an objective of one term without a name."
        )


def require_precision(
    model: nn.Module,
    precision: str,
    *,
    accum_dtype: torch.dtype | None,
    master_weights: Sequence[nn.Parameter] | None,
) -> None:
    """Refuse number formats that do not go together."""
    if precision not in get_args(Precision):
        raise ConfigError(f"precision={precision!r} is unknown. Set it to one of {', '.join(get_args(Precision))}.")
    if accum_dtype not in (None, torch.float32, torch.float64):
        raise ConfigError(
            f"accum_dtype={accum_dtype} is no wider than the gradients it should sum. Set it to torch.float32."
        )
    if master_weights is not None:
        _require_masters(model, master_weights, accum_dtype)
    elif precision == "fp16" and any(parameter.dtype in HALF for parameter in trainable(model)):
        raise ConfigError(
            "precision='fp16' scales the loss, and half-precision gradients cannot be unscaled without losing the "
            "small ones that the scale saved. Keep the parameters in float32 (autocast computes in fp16), or give "
            "master_weights."
        )


def _require_masters(model: nn.Module, master_weights: Sequence[nn.Parameter], accum_dtype: torch.dtype | None) -> None:
    expected = [(tuple(parameter.shape), torch.float32) for parameter in trainable(model)]
    if [(tuple(master.shape), master.dtype) for master in master_weights] != expected:
        raise ConfigError(
            f"master_weights holds {len(master_weights)} tensors that are not the float32 copies of the model's "
            f"{len(expected)} trainable parameters, so updates would land in the wrong ones. "
            "Make them with master_weights(model), after the last change to the model."
        )
    if accum_dtype not in (None, torch.float32):
        raise ConfigError(
            f"accum_dtype={accum_dtype} is not the type of the master weights, float32. Leave it at None."
        )


def explain(error: BaseException, model: nn.Module) -> None:
    """Raise in an error's stead where torch's own words do not say what to do.

    Raises:
        BatchError: the loss of a micro-batch depends on nothing that is trained.
    """
    if isinstance(error, RuntimeError) and NO_GRADIENT in str(error):
        raise BatchError(_why_no_gradient(model)) from error


def _why_no_gradient(model: nn.Module) -> str:
    if not torch.is_grad_enabled():
        return (
            "step() was called under torch.no_grad() or torch.inference_mode(), where no gradient is recorded. Call "
            "it outside; to measure a loss only, call the model yourself."
        )
    if not trainable(model):
        return (
            "no parameter of the model requires a gradient any more, so there is nothing to step on. Unfreeze some "
            "(requires_grad_(True)), or stop training."
        )
    return (
        "Objective.loss_sum returned a loss, or a term of one, that depends on no trained parameter: a constant, or "
        "something detached or computed under torch.no_grad(). Return it as computed from the model's output; where a "
        "term is a constant in some micro-batches, add 0 * output.sum() to it."
    )


def meet_reentrant_checkpoints(losses: Sequence[Tensor], *, several_ranks: bool) -> None:
    """Warn where a loss's graph holds a reentrant checkpoint, whose parameters' gradients may silently be missing.

    Raises:
        ConfigError: over several ranks, where it is reduced before it is whole.
    """
    if not _has_reentrant_checkpoint(losses):
        return
    if several_ranks:
        raise ConfigError(
            "the model uses reentrant activation checkpointing, which runs backward passes of its own inside the "
            "window's, so that gradients are reduced over ranks before they are whole. Pass use_reentrant=False to "
            "torch.utils.checkpoint.checkpoint."
        )
    warnings.warn(
        "the model uses reentrant activation checkpointing, which drops the gradients of a segment whose inputs need "
        "none and breaks gradient sync over ranks. Pass use_reentrant=False to torch.utils.checkpoint.checkpoint.",
        PreflightWarning,
        stacklevel=6,  # at the caller of Accumulator.step
    )


def _has_reentrant_checkpoint(losses: Sequence[Tensor]) -> bool:
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn for loss in losses]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
    return False


def _replays_cuda_graphs(module: nn.Module) -> bool:
    """Whether torch.compile(module), or module.compile(), was told to, as their contexts remember."""
    closure = getattr(module._compiled_call_impl, "__closure__", None) or ()
    contexts = [getattr(module, "dynamo_ctx", None), *(cell.cell_contents for cell in closure)]
    options = [getattr(context, "compiler_config", None) for context in contexts]
    return any(isinstance(each, dict) and each.get("triton.cudagraphs") for each in options)


def _named(name: str) -> str:
    return f"the model's module {name!r}" if name else "the model"

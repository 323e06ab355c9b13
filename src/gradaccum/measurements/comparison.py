"""One optimizer step taken in two ways: how far apart are gradients, parameters, loss and optimizer state?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradaccum.engine.batching import Batch
from gradaccum.engine.objective import Objective
from gradaccum.errors import ConfigError
from gradaccum.measurements.bench import Bench, make_optimizer, state_by_name
from gradaccum.measurements.setup import SGD, AdamW

TrainingStep = Callable[[nn.Module, Optimizer, Sequence[Batch]], Tensor]
"""Takes one optimizer step over a window's micro-batches; returns the mean loss."""

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Trace:
    """What one window did to a new model; every tensor in float64, on the CPU.

    Attributes:
        gradients: as the optimizer found them at its first step of the window, by parameter name.
        parameters: after the window.
        update: what the window added to them.
        state: the optimizer's, by kind (`momentum_buffer`, `exp_avg`, ...) and parameter name.
        loss: mean over the window's targets.
        optimizer_steps: how often the optimizer stepped.
        rates: the learning rates of that first step.
        dtype: what it was computed in.
    """

    gradients: Named
    parameters: Named
    update: Named
    state: dict[str, Named]
    loss: float
    optimizer_steps: int
    rates: tuple[float, ...]
    dtype: torch.dtype

    @property
    def grad_norm(self) -> float:
        return norm(self.gradients)


def take_step(
    bench: Bench,
    step: TrainingStep,
    window: Sequence[Batch],
    *,
    settings: SGD | AdamW,
    dtype: torch.dtype,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    fused: bool = True,
) -> Trace:
    """Let `step` take one window on a new model, wrapped if need be, and watch the optimizer.

    A fused optimizer leaves it to its kernel to unscale what a `GradScaler` scaled, after the gradients are looked at.
    """
    model = wrap(bench.model(dtype))
    optimizer = make_optimizer(model, settings, **({} if fused else {"fused": False}))
    before = wide(model.named_parameters())
    seen: list[Named] = []
    rates: list[float] = []

    def look() -> None:
        rates.extend(() if seen else (float(group["lr"]) for group in optimizer.param_groups))
        seen.append(wide((name, parameter.grad) for name, parameter in model.named_parameters()) if not seen else {})

    with torch.random.fork_rng():
        torch.manual_seed(bench.seed)
        hook = optimizer.register_step_pre_hook(partial(before_step, look))
        loss = step(model, optimizer, window)
        hook.remove()
    after = wide(model.named_parameters())
    return Trace(
        gradients=seen[0] if seen else {},
        parameters=after,
        update=difference(after, before),
        state=_state(model, optimizer),
        loss=float(loss.detach()),
        optimizer_steps=len(seen),
        rates=tuple(rates),
        dtype=dtype,
    )


def require_finite(stepped: Trace, optimizer: str, settings: SGD | AdamW) -> None:
    """Refuse a learning rate whose one step no float holds: nothing can be compared with that.

    Raises:
        ConfigError: gradients are finite, parameters after the step are not.
    """
    if math.isfinite(stepped.grad_norm) and not math.isfinite(largest(stepped.parameters)[1]):
        raise ConfigError(
            f"optimizers.{optimizer}.lr = {settings.lr:g}: after one step with it parameters are no longer finite, so "
            f"no two steps can be compared. Lower optimizers.{optimizer}.lr."
        )


def before_step(look: Callable[[], None], optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Look at the gradients; where the loop hands its last backward pass over as a closure, look after that."""
    del optimizer
    closure = next(filter(callable, [*args[1:], *kwargs.values()]), None)
    if closure is None:
        look()
        return None

    def then_look() -> Any:
        result = closure()
        look()
        return result

    return (args[0], then_look), {}


def full_batch_step(objective: Objective, clip_norm: float | None = None) -> TrainingStep:
    """The reference, in plain torch: one forward and backward pass over one batch."""

    def step(model: nn.Module, optimizer: Optimizer, window: Sequence[Batch]) -> Tensor:
        (batch,) = window
        loss = objective.share(model, batch, objective.totals(window))
        loss.backward()  # type: ignore[no-untyped-call]
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        return loss

    return step


@dataclass(frozen=True)
class Scale:
    """The magnitudes on which rounding acts: near an optimum the gradient is tiny against its parts.

    Attributes:
        gradient: L2 norm of `sum |w_i g_i|` over the micro-batches, after clipping.
        loss: `sum |w_i loss_i|`.
        state: the same for each kind of optimizer state after one step.
    """

    gradient: float
    loss: float
    state: dict[str, float]


def scale_of(bench: Bench, window: Sequence[Batch], *, settings: SGD | AdamW, dtype: torch.dtype) -> Scale:
    """Take each micro-batch's gradient by itself and sum the absolute values."""
    objective, model = bench.workload.objective, bench.model(dtype)
    totals = objective.totals(window)
    magnitudes: Named = {}
    signed: Named = {}
    loss_scale = 0.0
    for batch in window:
        model.zero_grad()
        loss = objective.share(model, batch, totals)
        loss.backward()  # type: ignore[no-untyped-call]
        loss_scale += abs(float(loss.detach()))
        for name, gradient in wide((name, each.grad) for name, each in model.named_parameters()).items():
            magnitudes[name] = magnitudes.get(name, torch.zeros(())) + gradient.abs()
            signed[name] = signed.get(name, torch.zeros(())) + gradient
    clipped = 1.0 if settings.clip_norm is None else min(1.0, settings.clip_norm / (norm(signed) + 1e-6))
    size = norm(magnitudes) * clipped
    if isinstance(settings, SGD):
        return Scale(size, loss_scale, {"momentum_buffer": size})
    first, second = settings.betas
    squared = norm({name: (clipped * value) ** 2 for name, value in magnitudes.items()})
    return Scale(size, loss_scale, {"exp_avg": (1 - first) * size, "exp_avg_sq": (1 - second) * squared})


def wide(named: Iterable[tuple[str, Tensor | None]]) -> Named:
    """Copies in float64 on the CPU, whole where they are sharded, without what is None; DDP adds nothing to a name."""
    return {
        name.removeprefix("module."): dense(whole(value.detach())).to("cpu", torch.float64, copy=True)
        for name, value in named
        if value is not None
    }


def whole(tensor: Tensor) -> Tensor:
    """All of a sharded tensor; every rank must ask for it."""
    full_tensor = getattr(tensor, "full_tensor", None)
    return full_tensor() if full_tensor else tensor


def dense(tensor: Tensor) -> Tensor:
    """Embeddings may have sparse gradients."""
    return tensor.to_dense() if tensor.is_sparse else tensor


def norm(named: Named) -> float:
    """L2 norm over all tensors together."""
    return float(torch.linalg.vector_norm(flat(named))) if named else 0.0


def same(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether they differ by at most that part of the other's L2 norm; never where either is not finite."""
    return float(torch.linalg.vector_norm(one - other)) <= tolerance * float(torch.linalg.vector_norm(other))


def flat(named: Named) -> Tensor:
    return torch.cat([named[name].flatten() for name in sorted(named)])


def difference(one: Named, other: Named) -> Named:
    """What is missing on one side counts as zero."""
    zero = torch.zeros((), dtype=torch.float64)
    return {name: one.get(name, zero) - other.get(name, zero) for name in {*one, *other}}


def largest(named: Named) -> tuple[str, float]:
    """Name and value of the largest absolute entry; NaN counts as the largest."""
    sizes = {name: float(value.abs().max()) for name, value in named.items() if value.numel()}
    if not sizes:
        return "", 0.0
    name = max(sizes, key=lambda each: (sizes[each] != sizes[each], sizes[each]))
    return name, sizes[name]


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Named]:
    kinds: dict[str, dict[str, Tensor | None]] = {}
    for name, state in state_by_name(model, optimizer):
        for kind, value in state.items():
            if isinstance(value, Tensor):
                kinds.setdefault(kind, {})[name] = value
    return {kind: wide(values.items()) for kind, values in kinds.items()}

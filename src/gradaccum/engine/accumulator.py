"""One optimizer step over a window of micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradaccum.engine import gradients
from gradaccum.engine.batching import Batch, batch_size
from gradaccum.engine.gradient_sync import gradient_sync, refuse_wrapped
from gradaccum.engine.objective import Objective
from gradaccum.errors import BatchError, ConfigError


@dataclass(frozen=True)
class StepResult:
    """What one window did.

    Attributes:
        loss: mean loss over all targets of the window, a detached scalar; NaN where there was no target.
        grad_norm: global L2 norm of the window's gradient before clipping, a detached scalar.
        count: targets (or the sum of their weights).
        samples: samples in the window's micro-batches.
        micro_batches: micro-batches in the window.
        sync_calls: backward passes that ran with gradient sync enabled.
        applied: whether the optimizer stepped.
    """

    loss: Tensor
    grad_norm: Tensor
    count: float
    samples: int
    micro_batches: int
    sync_calls: int
    applied: bool


class Accumulator:
    """Accumulates a window's gradient and steps the optimizer once.

    The gradient of every window, ragged or not, is that of `sum of loss_sum / sum of count` over the window. If a
    micro-batch raises, parameters, optimizer and scheduler are as before, and the next window starts clean.

    Args:
        model: any module whose parameters the optimizer steps.
        optimizer: a torch optimizer over them; one that needs a closure (LBFGS) is refused.
        objective: the loss, as sum and count.
        scheduler: ticks once after each step that was applied.
        clip_norm: largest global gradient norm, applied once to the whole window's gradient; None clips nothing.
        sync: reduce over ranks on the `last` micro-batch of a window, or on `every` one (the costly way, to compare).

    Raises:
        ConfigError: something that cannot be right.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        objective: Objective,
        *,
        scheduler: LRScheduler | None = None,
        clip_norm: float | None = None,
        sync: Literal["last", "every"] = "last",
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.objective = objective
        self.scheduler = scheduler
        self.clip_norm = clip_norm
        self.sync = sync
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._refuse_what_cannot_be_right()

    def step(self, window: Sequence[Batch]) -> StepResult:
        """Forward and backward over every micro-batch of the window, then one optimizer step.

        Gradients stay in `.grad` until the next window, for whoever wants to look at them.

        Raises:
            BatchError: the window is empty, a count is no number of targets, or the objective gives no scalar.
        """
        if not window:
            raise BatchError("the window is empty, so there is no gradient to step on. Give at least one micro-batch.")
        counts = counts_of(self.objective, window)
        count = sum(counts)
        samples = sum(batch_size(batch) for batch in window)
        gradients.clear(self._parameters)
        try:
            loss, sync_calls = self._accumulate(window, counts)
            grad_norm = self._norm_then_clip()
        except BaseException:
            gradients.clear(self._parameters)
            raise
        if count:
            self._advance()
        return StepResult(loss, grad_norm, count, samples, len(window), sync_calls, applied=count > 0)

    def _accumulate(self, window: Sequence[Batch], counts: Sequence[float]) -> tuple[Tensor, int]:
        """Leave the window's gradient in `.grad`; returns its mean loss and how many backward passes synced."""
        with_targets = [batch for batch, count in zip(window, counts, strict=True) if count]
        losses: list[Tensor] = []
        sync_calls = 0
        for index, batch in enumerate(with_targets, start=1):
            synced = self.sync == "every" or index == len(with_targets)
            with gradient_sync(self.model, enabled=synced):
                loss_sum = self.objective.loss_sum(self.model, batch)
                _require_scalar(loss_sum)
                if not losses:
                    share = loss_sum.new_full((), 1 / sum(counts))  # as the seed it scales without a division node
                loss_sum.backward(share)  # type: ignore[no-untyped-call]
            losses.append(loss_sum.detach())
            sync_calls += synced
        return torch.stack(losses).sum() * share if losses else torch.tensor(math.nan), sync_calls

    def _norm_then_clip(self) -> Tensor:
        window_gradients = gradients.gradients_of(self._parameters)
        norm = gradients.global_norm(window_gradients)
        if self.clip_norm is not None:
            gradients.clip(window_gradients, norm, self.clip_norm)
        return norm

    def _advance(self) -> None:
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def _refuse_what_cannot_be_right(self) -> None:
        refuse_wrapped(self.model)
        if self.sync not in ("last", "every"):
            raise ConfigError(f"sync={self.sync!r} is unknown. Set it to 'last' (one reduction a window) or 'every'.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(
                f"clip_norm={self.clip_norm} would erase or turn round every gradient. Set it above 0, or to None."
            )
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "LBFGS evaluates the loss several times a step through a closure, but a window's gradient is computed "
                "once. Use an optimizer that steps on a given gradient, such as SGD or AdamW."
            )
        stepped = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        if not stepped.intersection(self._parameters):
            raise ConfigError(
                "the optimizer steps none of the model's trainable parameters, so no window would change the model. "
                "Build the optimizer from this model's parameters(), after the last change to the model."
            )
        if self.scheduler is not None and self.scheduler.optimizer is not self.optimizer:
            raise ConfigError(
                "the scheduler belongs to another optimizer, so this one's learning rate would never change. "
                "Build the scheduler from the optimizer given here."
            )


def counts_of(objective: Objective, window: Sequence[Batch]) -> list[float]:
    """Targets of each micro-batch, read from their devices at once."""
    counts = [objective.count(batch) for batch in window]
    if any(isinstance(count, Tensor) for count in counts):
        counts = torch.stack([torch.as_tensor(count).detach() for count in counts]).tolist()
    for index, count in enumerate(counts):
        if isinstance(count, Tensor) or not (0 <= count < math.inf):
            raise BatchError(
                f"micro-batch {index} of the window counts {count} targets, and nothing can be divided by that. "
                "Return a finite number of at least 0 from Objective.count."
            )
    return [float(count) for count in counts]


def _require_scalar(loss_sum: Tensor) -> None:
    if loss_sum.dim():
        raise BatchError(
            f"Objective.loss_sum returned a tensor of shape {tuple(loss_sum.shape)}, not a scalar, so there is no one "
            "loss to differentiate. Return the sum over the micro-batch's targets (reduction='sum')."
        )

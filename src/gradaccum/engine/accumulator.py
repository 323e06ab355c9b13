"""One optimizer step over a window of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradaccum.engine import gradients, preflight
from gradaccum.engine.batching import Batch, samples_in, split
from gradaccum.engine.fitting import Fitting
from gradaccum.engine.gradient_sync import gradient_sync, refuse_wrapped
from gradaccum.engine.objective import Objective
from gradaccum.engine.observer import NoObserver, Note, Observer
from gradaccum.engine.precision import LossScale, Precision, autocast, gradients_for
from gradaccum.engine.state import restore, state_of
from gradaccum.engine.step_result import LossSums, StepResult, weighted_sum
from gradaccum.errors import BatchError, StateError

__all__ = ["Accumulator", "StepResult"]


class Accumulator:
    """Accumulates a window's gradient and steps the optimizer once.

    The gradient of every window, ragged or not, is that of `sum of loss_sum / sum of count` over the window. If
    anything raises before the optimizer's step begins, parameters, optimizer, scheduler and loss scale are as before
    the window, and the next one starts clean.

    Args:
        model: any module whose parameters the optimizer steps.
        optimizer: a torch optimizer over them; one that needs a closure (LBFGS) is refused.
        objective: the loss, as sum and count.
        scheduler: ticks once after each step that was applied.
        clip_norm: largest global gradient norm, applied once to the whole window's gradient; None clips nothing.
        sync: reduce over ranks on the `last` micro-batch of a window, or on `every` one (the costly way, to compare).
        precision: `bf16` and `fp16` run forward and loss under autocast; `fp16` also scales the loss, and skips the
            step of a window whose gradient overflowed.
        accum_dtype: sum half-precision gradients in this type, rounding once before the step; None sums in their own.
        master_weights: of a half-precision model, from `master_weights(model)`; the optimizer steps on these.
        observer: watches the gradients of every window, as `NoiseScale` does.
        after_step: called in turn with the model after each step that was applied (to average weights, say).

    Attributes:
        steps: windows whose step was applied.
        loss_scale: of precision `fp16`; None otherwise.

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
        precision: Precision = "float32",
        accum_dtype: torch.dtype | None = None,
        master_weights: Sequence[nn.Parameter] | None = None,
        observer: Observer | None = None,
        after_step: Sequence[Callable[[nn.Module], object]] = (),
    ) -> None:
        refuse_wrapped(model)
        preflight.require_sync(sync)
        preflight.require_clip_norm(clip_norm)
        preflight.require_model(model)
        preflight.require_precision(model, precision, accum_dtype=accum_dtype, master_weights=master_weights)
        preflight.require_optimizer(optimizer, model, master_weights=master_weights)
        preflight.require_scheduler(scheduler, optimizer)
        preflight.require_one_count(observer, objective)
        self.model = model
        self.optimizer = optimizer
        self.objective = objective
        self.scheduler = scheduler
        self.clip_norm = clip_norm
        self.sync = sync
        self.precision: Precision = precision
        self.master_weights = master_weights
        self.observer = observer or NoObserver()
        self.after_step = tuple(after_step)
        self.steps = 0
        self.loss_scale = LossScale() if precision == "fp16" else None
        self._gradients = gradients_for(model, optimizer, accum_dtype=accum_dtype, master_weights=master_weights)
        self._fitting = Fitting()
        self._in_window = False
        self._looked = False

    def step(self, window: Sequence[Batch]) -> StepResult:
        """Forward and backward over every micro-batch of the window, then one optimizer step.

        Gradients stay in `.grad` (of the master weights, where there are any) until the next window; those of a
        skipped step are dropped.

        Raises:
            BatchError: the window is empty, a count is no number of targets, or the objective gives no scalar.
        """
        if not window:
            raise BatchError("the window is empty, so there is no gradient to step on. Give at least one micro-batch.")
        self._in_window = True
        try:
            samples = sum([samples_in(batch) for batch in window])
            sums, sync_calls, grad_norm = self._gather(window)
            skip_reason = self._skip_reason(sums.totals, grad_norm)
            self._advance(applied=not skip_reason, counted=any(sums.totals))
        finally:
            self._in_window = False
        for callback in () if skip_reason else self.after_step:
            callback(self.model)
        means = sums.means()
        return StepResult(
            loss=weighted_sum(means, self.objective.terms.values()) if self.objective.weights else means[0],
            grad_norm=grad_norm,
            count=sums.totals[0],
            samples=samples,
            micro_batches=len(window),
            sync_calls=sync_calls,
            applied=not skip_reason,
            terms=dict(zip(self.objective.terms, means, strict=True)) if self.objective.weights else {},
            skip_reason=skip_reason,
        )

    def step_batch(self, batch: Batch, micro_batch: int | Literal["auto"] = "auto") -> StepResult:
        """One step on a whole batch, split inside; `auto` finds the micro-batch that fits, as `Fitting` tells."""
        return self._fitting.step(self, batch) if micro_batch == "auto" else self.step(split(batch, micro_batch))

    def _gather(self, window: Sequence[Batch]) -> tuple[LossSums, int, Tensor]:
        """The window's gradient, unscaled and clipped, where the optimizer finds it; if that raises, no gradient."""
        try:
            self._gradients.clear()
            counts = self.objective.counts(window)
            with self.observer.watch(self._gradients.parameters, micro_batches=len(window)) as note:
                sums, sync_calls = self._accumulate(window, counts, note)
            whole = self._gradients.whole()
            if self.loss_scale is not None:
                gradients.scale(whole, 1 / self.loss_scale.value)
            grad_norm = gradients.global_norm(whole)
            self.observer.finish(grad_norm, sums.totals[0])
            if self.clip_norm is not None:
                gradients.clip(whole, grad_norm, self.clip_norm)
            self._gradients.hand_over()
        except BaseException:
            self._gradients.clear()
            raise
        return sums, sync_calls, grad_norm

    def _accumulate(
        self, window: Sequence[Batch], counts: Sequence[Sequence[float]], note: Note
    ) -> tuple[LossSums, int]:
        """Backward of every micro-batch that has targets; returns the loss sums and how many passes synced."""
        totals = [sum(of_term) for of_term in zip(*counts, strict=True)]
        with_targets = [(batch, of_batch) for batch, of_batch in zip(window, counts, strict=True) if any(of_batch)]
        shares = self._shares(totals)
        last = len(with_targets) - 1
        computing = autocast(self.precision, self._gradients.device)
        seeds: list[Tensor] = []
        losses: list[list[Tensor]] = []
        sync_calls = 0
        for index, (batch, of_batch) in enumerate(with_targets):
            synced = index == last or self.sync == "every"
            with gradient_sync(self.model, enabled=synced):
                with computing:
                    sums = self.objective.loss_sums(self.model, batch)
                if not seeds:
                    seeds = self._seeds(sums, shares)
                if all(of_batch):
                    torch.autograd.backward(sums, seeds)
                else:
                    torch.autograd.backward(list(compress(sums, of_batch)), list(compress(seeds, of_batch)))
            note(of_batch[0], shares[0])
            self._gradients.absorb()
            losses.append([loss.detach() for loss in sums])
            sync_calls += synced
        return LossSums(losses, [of_batch for _, of_batch in with_targets], totals), sync_calls

    def _shares(self, totals: Sequence[float]) -> list[float]:
        """What each term's loss sum is multiplied by, so that the window's gradient is that of its mean."""
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        weights = self.objective.terms.values()
        return [scale * weight / total if total else 0.0 for weight, total in zip(weights, totals, strict=True)]

    def _seeds(self, sums: Sequence[Tensor], shares: Sequence[float]) -> list[Tensor]:
        """What backward starts from: as its seed, a share scales the loss without a division node."""
        if not self._looked:
            self._looked = True
            preflight.warn_of_reentrant_checkpoints(sums)
        return [loss_sum.new_full((), share) for loss_sum, share in zip(sums, shares, strict=True)]

    def _skip_reason(self, totals: Sequence[float], grad_norm: Tensor) -> str:
        if not any(totals):
            return "no micro-batch of the window has a target"
        if self.loss_scale is not None and not torch.isfinite(grad_norm):
            return f"the gradient overflowed at a loss scale of {self.loss_scale.value:g}, which is halved now"
        return ""

    def _advance(self, *, applied: bool, counted: bool) -> None:
        if applied:
            self.optimizer.step()
            self._gradients.write_back()
            if self.scheduler is not None:
                self.scheduler.step()
            self.steps += 1
        else:
            self._gradients.clear()
        if self.loss_scale is not None and counted:
            self.loss_scale.update(overflowed=not applied)

    def state_dict(self) -> dict[str, Any]:
        """What a run needs, beside the model's own state, to continue bit for bit from this window boundary.

        Raises:
            StateError: asked for in the middle of a window, whose gradient it could not hold.
        """
        if self._in_window:
            raise StateError(
                "state_dict() was called in the middle of a window, and a gradient accumulated half cannot be "
                "continued. Call it between two step() calls, or from after_step."
            )
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was asked for; load the model's own state before.

        Raises:
            StateError: the state is of an accumulator with other parts, which could not continue.
        """
        restore(self, state)

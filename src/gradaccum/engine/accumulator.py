"""One optimizer step over a window of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradaccum.engine import gradients, preflight, wrapping
from gradaccum.engine.batching import Batch, split
from gradaccum.engine.fitting import Fitting
from gradaccum.engine.gradient_sync import forget
from gradaccum.engine.held import Held
from gradaccum.engine.objective import Objective
from gradaccum.engine.observer import Observer
from gradaccum.engine.passes import Passes
from gradaccum.engine.precision import LossScale, Precision, gradients_for
from gradaccum.engine.ranks import Work, ranks_of
from gradaccum.engine.state import in_mid_window, restore, state_of
from gradaccum.engine.step_result import LossSums, StepResult

__all__ = ["Accumulator", "StepResult"]


class Accumulator:
    """Accumulates a window's gradient and steps the optimizer once.

    The gradient of every window, ragged or not, is that of `sum of loss_sum / sum of count` over the window and, where
    the model is spread over ranks, over all of them. If anything raises before the optimizer's step begins, parameters,
    optimizer, scheduler and loss scale are as before the window, and the next one starts clean.

    Args:
        model: any module whose parameters the optimizer steps; on several ranks wrapped in DistributedDataParallel, or
            sharded with fully_shard.
        optimizer: a torch optimizer over them; one that needs a closure (LBFGS) is refused.
        objective: the loss, as sum and count.
        scheduler: ticks once after each step that was applied.
        clip_norm: largest global gradient norm, applied once to the whole window's gradient; None clips nothing.
        sync: reduce over ranks on the `last` micro-batch of a window, or on `every` one (the costly way; it saves
            fully_shard the memory of one whole gradient a rank).
        keep_gathered: parameters of fully_shard stay whole from one micro-batch of a window to the next: fewer gathers,
            for the memory of all parameters.
        precision: `bf16` and `fp16` run forward and loss under autocast; `fp16` also scales the loss, and skips the
            step of a window whose gradient overflowed.
        accum_dtype: sum half-precision gradients in this type, rounding once before the step; None sums in their own.
        master_weights: of a half-precision model, from `master_weights(model)`; the optimizer steps on these.
        observer: watches the gradients of every window, as `NoiseScale` does.
        after_step: called in turn with the model after each step that was applied (to average weights, say). Beside
            master weights it may only read: the next step starts from those.

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
        keep_gathered: bool = False,
        precision: Precision = "float32",
        accum_dtype: torch.dtype | None = None,
        master_weights: Sequence[nn.Parameter] | None = None,
        observer: Observer | None = None,
        after_step: Sequence[Callable[[nn.Module], object]] = (),
    ) -> None:
        preflight.require_parts(model, optimizer, objective)
        preflight.require_options(sync=sync, clip_norm=clip_norm, after_step=after_step)
        preflight.require_model(model)
        preflight.require_precision(model, precision, accum_dtype=accum_dtype, master_weights=master_weights)
        preflight.require_optimizer(optimizer, model, master_weights=master_weights)
        preflight.require_scheduler(scheduler, optimizer)
        preflight.require_observer(observer, objective)
        wrapping.require_spread(model, optimizer, observer=observer, wide=accum_dtype or master_weights, sync=sync)
        self._ranks = ranks_of(model)
        self.model, self.optimizer, self.objective = model, optimizer, objective
        self.scheduler, self.clip_norm = scheduler, clip_norm
        self.master_weights = master_weights
        self.observer = observer
        self.after_step = tuple(after_step)
        self.steps = 0
        self.loss_scale = LossScale() if precision == "fp16" else None
        self._gradients = gradients_for(model, optimizer, accum_dtype=accum_dtype, master_weights=master_weights)
        self._passes = Passes(
            model, self._ranks, self._gradients, sync=sync, keep_gathered=keep_gathered, precision=precision
        )
        self._traffic = self._passes.traffic
        self._held, self._fitting = Held(model, optimizer, self._gradients), Fitting()
        self._in_window = False

    def step(self, window: Sequence[Batch]) -> StepResult:
        """Forward and backward over every micro-batch of the window, then one optimizer step.

        On several ranks all must call it together, each with micro-batches of its own; one that has none left gives an
        empty window. Gradients stay in `.grad` (of the master weights, where there are any) until the next window;
        those of a skipped step are dropped.

        Raises:
            BatchError: the window is empty, a count is no number of targets, or the objective gives no scalar.
            RankError: another rank is gone.
        """
        if self._in_window:
            raise in_mid_window("step()")
        self._held.require_unchanged()
        self._traffic.begin_window()
        self._in_window = True
        try:
            work, sums, grad_norm = self._gather(window)
            loss, terms = self._reported(sums)
            skip_reason = self._skip_reason(sums.totals, grad_norm)
            self._advance(sums.totals, skip_reason)
        finally:
            self._in_window = False
        for callback in () if skip_reason else self.after_step:
            callback(self.model)
        return StepResult(
            loss=loss,
            grad_norm=grad_norm,
            count=sums.totals[0],
            samples=work.samples,
            micro_batches=len(window),
            sync_calls=self._traffic.sync_calls,
            reductions=self._traffic.reductions,
            reduced_bytes=self._traffic.reduced_bytes,
            gathered_bytes=self._traffic.gathered_bytes,
            applied=not skip_reason,
            terms=terms,
            skip_reason=skip_reason,
        )

    def step_batch(self, batch: Batch, micro_batch: int | Literal["auto"] = "auto") -> StepResult:
        """One step on a whole batch, split inside; `auto` finds the micro-batch that fits, as `Fitting` tells."""
        return self._fitting.step(self, batch) if micro_batch == "auto" else self.step(split(batch, micro_batch))

    def _gather(self, window: Sequence[Batch]) -> tuple[Work, LossSums, Tensor]:
        """The window's gradient, unscaled and clipped, where the optimizer finds it; if that raises, no gradient."""
        try:
            self._gradients.clear()
            work = self._ranks.share(self.objective, window)
            shares = self._shares(work.totals)
            if self.observer is None:
                sums = self._passes.make(work, self.objective, shares=shares)
            else:
                with self.observer.watch(self._gradients.parameters, micro_batches=len(window)) as note:
                    sums = self._passes.make(work, self.objective, shares=shares, note=note)
            if work.all_passes > len(work.batches):
                self._passes.replay(work, self.objective)
            trained, found = self._gradients.trained(), self._ranks.local(self._gradients.whole())
            self._held.require_known(trained, found)
            if self.loss_scale is not None:
                gradients.scale(found, 1 / self.loss_scale.value)
            sums, grad_norm = self._ranks.conclude(sums, found)
            if self.observer is not None:
                self.observer.finish(grad_norm, sums.totals[0])
            if self.clip_norm is not None:
                gradients.clip(found, grad_norm, self.clip_norm)
            self._gradients.hand_over()
        except BaseException as error:
            self._gradients.clear()
            forget(self.model)
            self._ranks.explain(error)
            preflight.explain(error, self.model)
            raise
        return work, sums, grad_norm

    def _shares(self, totals: Sequence[float]) -> list[float]:
        """What each term's loss sum is multiplied by; reduction means over ranks, and what is wanted is the sum."""
        scale = self._ranks.world_size * (1.0 if self.loss_scale is None else self.loss_scale.value)
        if self.objective.weights is None:
            return [scale / totals[0] if totals[0] else 0.0]
        weighted = zip(self.objective.weights.values(), totals, strict=True)
        return [scale * weight / total if total else 0.0 for weight, total in weighted]

    def _reported(self, sums: LossSums) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The window's loss, and the mean of each named term."""
        means, weights = sums.means(), self.objective.weights
        if weights is None:
            return means[0], {}
        return sums.weighted(means, weights.values()), dict(zip(weights, means, strict=True))

    def _skip_reason(self, totals: Sequence[float], grad_norm: Tensor) -> str:
        if not any(totals):
            return "no micro-batch of the window has a target"
        if self.loss_scale is not None and not torch.isfinite(grad_norm):
            return f"the gradient overflowed at a loss scale of {self.loss_scale.value:g}{self.loss_scale.outlook()}"
        return ""

    def _advance(self, totals: Sequence[float], skip_reason: str) -> None:
        if not skip_reason:
            self.optimizer.step()
            self._gradients.write_back()
            self.steps += 1
            torch.clear_autocast_cache()  # an autocast around the loop would go on with casts of the old weights
        else:
            self._gradients.clear()
        if self.loss_scale is not None and any(totals):
            self.loss_scale.update(overflowed=bool(skip_reason))
        if self.scheduler is not None and not skip_reason:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """What a run needs, beside the model's own state, to continue bit for bit from this window boundary.

        Raises:
            StateError: asked for in the middle of a window, whose gradient it could not hold.
        """
        if self._in_window:
            raise in_mid_window("state_dict()")
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was asked for; load the model's own state before.

        Raises:
            StateError: the state is of an accumulator with other parts, which could not continue; or a window is open.
        """
        if self._in_window:
            raise in_mid_window("load_state_dict()")
        restore(self, state)

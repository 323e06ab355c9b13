"""What is diagnosed: a model, an objective and a loop, on one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gradaccum.engine.batching import Batch, batch_size, split, to
from gradaccum.engine.objective import Objective
from gradaccum.engine.structure import map_tensors
from gradaccum.errors import GradaccumError
from gradaccum.measurements.bench import Bench
from gradaccum.measurements.comparison import Trace, take_step
from gradaccum.measurements.lower_precision import MATCH
from gradaccum.measurements.randomness import Quiet, quieten
from gradaccum.measurements.watching import SETTINGS
from gradaccum.workloads.workload import Workload

Step = Callable[[nn.Module, Optimizer, Sequence[Batch]], Any]
"""A training loop: takes one optimizer step over a window's micro-batches; may return the window's mean loss."""

CPU = torch.device("cpu")


class UnjudgedError(GradaccumError):
    """Nothing can be said: what should be compared differs from itself, or does not run."""


@dataclass(frozen=True)
class Subject:
    """What is diagnosed.

    Attributes:
        random: what draws random numbers in training, and is turned off for the comparison.
        match: as close as two right numbers come in float64, relative.
    """

    model_factory: Callable[[], nn.Module]
    objective: Objective
    batch: Batch
    step: Step
    seed: int
    random: tuple[str, ...] = ()
    match: float = MATCH

    @property
    def samples(self) -> int:
        return batch_size(self.batch)

    def bench(self) -> Bench:
        workload = Workload("diagnosed", self.model_factory, self.objective, [], [], collate=lambda samples: samples)
        return Bench(workload, CPU, self.seed)

    def window(self, cut: Sequence[int], dtype: torch.dtype) -> list[Batch]:
        """Pieces of a copy of the batch: a loop or a model may change them."""
        return split(map_tensors(to(self.batch, CPU, dtype), Tensor.clone), cut)

    def whole(self, dtype: torch.dtype = torch.float64) -> Batch:
        (whole,) = self.window([self.samples], dtype)
        return whole

    def model(self) -> nn.Module:
        return self.bench().model(torch.float64)

    def quiet(self) -> tuple[Subject, Quiet]:
        """The same with randomness off, and what was random."""
        ready = replace(self, model_factory=partial(self._ready, self.model_factory))
        ready.require_judgeable()
        quiet = quieten(ready.model, ready.gradient)
        if quiet.still_random:
            raise UnjudgedError(
                "the same model on the same batch gives another gradient each time, even in evaluation mode, so no two "
                "computations can be compared. Draw the random numbers of model and objective from torch's generator "
                "in layers that evaluation mode turns off, or leave them out."
            )
        make = ready.model_factory
        return replace(ready, model_factory=lambda: quiet.apply(make()), random=quiet.names), quiet

    def _ready(self, make_model: Callable[[], nn.Module]) -> nn.Module:
        """With lazy parameters made, and dense gradients, which are the same numbers."""
        model = make_model()
        for module in model.modules():
            if getattr(module, "sparse", None) is True:
                module.sparse = False  # type: ignore[assignment]
        if any(map(is_lazy, model.parameters())):
            with torch.no_grad():
                self.objective.loss_sums(model, self.whole(torch.float32))
        return model

    def gradient(self, model: nn.Module) -> list[Tensor]:
        """The full batch's."""
        whole = self.whole()
        loss = self.objective.share(model, whole, self.objective.totals([whole]))
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return [part for part in torch.autograd.grad(loss, parameters, allow_unused=True) if part is not None]

    def require_judgeable(self) -> None:
        """Refuse what has no gradient to compare, or models that are not made anew."""
        model, other = self.model(), self.model()
        if {id(parameter) for parameter in model.parameters()} & {id(parameter) for parameter in other.parameters()}:
            raise UnjudgedError(
                "model_factory returns the same parameters each time, so that every computation would start where the "
                "last one ended. Make a new model in each call."
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UnjudgedError("no parameter of the model requires a gradient, so there is none to compare.")
        if not any(self.objective.totals([self.whole()])):
            raise UnjudgedError("no sample of the batch has a target, so there is no gradient. Give another batch.")
        gradient = self.gradient(model)
        if not all(part.isfinite().all() for part in gradient):
            raise UnjudgedError(
                "the gradient of the whole batch is not finite, so nothing can be compared with it. Give inputs and "
                "initial parameters on which the loss is finite."
            )
        if not any(part.any() for part in gradient):
            raise UnjudgedError(
                "the gradient of the whole batch is zero everywhere, so that any loop would agree with it. Give inputs "
                "and initial parameters from which something can be learned (dead units learn nothing)."
            )

    def trace(self, step: Step, cut: Sequence[int], dtype: torch.dtype, *, rate: float = SETTINGS.lr) -> Trace:
        """What the step did; of a loop that returns no loss, the full batch's is taken for it."""

        def with_loss(model: nn.Module, optimizer: Optimizer, window: Sequence[Batch]) -> Tensor:
            loss = step(model, optimizer, window)
            if isinstance(loss, Tensor) and loss.numel() != 1:
                raise UnjudgedError(
                    f"the step returned a tensor of shape {tuple(loss.shape)}. Return the window's mean loss, or none."
                )
            told = loss if isinstance(loss, Tensor | float) else self.loss(dtype)
            return torch.as_tensor(told, dtype=torch.float64)

        settings = replace(SETTINGS, lr=rate)
        return take_step(self.bench(), with_loss, self.window(cut, dtype), settings=settings, dtype=dtype, fused=False)

    def loss(self, dtype: torch.dtype) -> Tensor:
        """The full batch's mean."""
        whole = self.whole(dtype)
        return self.objective.share(self.bench().model(dtype), whole, self.objective.totals([whole])).detach()

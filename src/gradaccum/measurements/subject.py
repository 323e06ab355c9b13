"""What is diagnosed: a model, an objective and a loop, on one batch; and one cut of it against the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradaccum.engine.batching import Batch, batch_size, split, to
from gradaccum.engine.objective import Objective
from gradaccum.errors import GradaccumError
from gradaccum.measurements.bench import Bench
from gradaccum.measurements.comparison import Trace, full_batch_step, norm, scale_of, take_step
from gradaccum.measurements.evidence import Quiet, quieten
from gradaccum.measurements.habits import SETTINGS, clip_norm_of, next_window_differs, runs_in_evaluation_mode
from gradaccum.measurements.mistake import name_the_mistake
from gradaccum.measurements.verdict import Difference, Verdict, judge, ratio
from gradaccum.workloads.workload import Workload

Step = Callable[[nn.Module, Optimizer, Sequence[Batch]], Any]
"""A training loop: takes one optimizer step over a window's micro-batches; may return the window's mean loss."""

CPU = torch.device("cpu")
TOLERANCE = 1e-4


class UnjudgedError(GradaccumError):
    """Nothing can be said: what should be compared differs from itself, or does not run."""


@dataclass(frozen=True)
class ParameterDifference:
    """One parameter's gradient in float64: distance to the full batch's and ratio of norms."""

    name: str
    relative_difference: float
    norm_ratio: float


@dataclass(frozen=True)
class CutDiagnosis:
    """One cut against the full batch.

    Attributes:
        cut: sizes of the micro-batches.
        sharp, single: differences in float64 and in float32.
        optimizer_steps: how often the loop stepped.
        mistake: what the loop does to the gradient of right accumulation, or of the window after it; empty where it is
            that gradient.
        clip_norm: what the loop clips the window's gradient to, rightly; None where it does not clip.
        parameters: every parameter, the worst one first.
    """

    cut: tuple[int, ...]
    sharp: Difference
    single: Difference
    verdict: Verdict
    optimizer_steps: int
    mistake: str
    clip_norm: float | None
    parameters: tuple[ParameterDifference, ...]

    @property
    def equivalent(self) -> bool:
        return self.verdict.equivalent and self.optimizer_steps == 1 and not self.mistake


@dataclass(frozen=True)
class Subject:
    """What is diagnosed.

    Attributes:
        dropouts: layers that drop out in training, and are turned off for the comparison.
    """

    model_factory: Callable[[], nn.Module]
    objective: Objective
    batch: Batch
    step: Step
    seed: int
    dropouts: tuple[str, ...] = ()

    def bench(self) -> Bench:
        workload = Workload("diagnosed", self.model_factory, self.objective, [], [], collate=lambda samples: samples)
        return Bench(workload, CPU, self.seed)

    def window(self, cut: Sequence[int], dtype: torch.dtype) -> list[Batch]:
        return split(to(self.batch, CPU, dtype), cut)

    def model(self) -> nn.Module:
        return self.bench().model(torch.float64)

    def quiet(self) -> tuple[Subject, Quiet]:
        """The same with randomness off, and what was random."""
        (whole,) = self.window([batch_size(self.batch)], torch.float64)
        self.require_judgeable(whole)
        quiet = quieten(self.model, lambda model: full_batch_gradient(model, self.objective, whole))
        if quiet.still_random:
            raise UnjudgedError(
                "the same model on the same batch gives another gradient each time, even in evaluation mode, so no two "
                "computations can be compared. Draw the random numbers of model and objective from torch's generator "
                "in layers that evaluation mode turns off, or leave them out."
            )
        make = self.model_factory
        return replace(self, model_factory=lambda: quiet.apply(make()), dropouts=quiet.dropouts), quiet

    def require_judgeable(self, whole: Batch) -> None:
        """Refuse what has no gradient to compare, or models that are not made anew."""
        model, other = self.model(), self.model()
        if {id(parameter) for parameter in model.parameters()} & {id(parameter) for parameter in other.parameters()}:
            raise UnjudgedError(
                "model_factory returns the same parameters each time, so that every computation would start where the "
                "last one ended. Make a new model in each call."
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UnjudgedError("no parameter of the model requires a gradient, so there is none to compare.")
        if not any(self.objective.totals([whole])):
            raise UnjudgedError("no sample of the batch has a target, so there is no gradient. Give another batch.")
        if not all(part.isfinite().all() for part in full_batch_gradient(model, self.objective, whole)):
            raise UnjudgedError(
                "the gradient of the whole batch is not finite, so nothing can be compared with it. Give inputs and "
                "initial parameters on which the loss is finite."
            )

    def judge(self, cut: tuple[int, ...]) -> CutDiagnosis:
        whole, clip_norm = (sum(cut),), clip_norm_of(self, cut)
        settings = replace(SETTINGS, clip_norm=clip_norm)
        differences, traces, references = [], [], []
        for dtype in (torch.float64, torch.float32):
            reference = self.trace(full_batch_step(self.objective, clip_norm), whole, dtype)
            trace = self.trace(self.step, cut, dtype, default_loss=reference.loss)
            scale = scale_of(self.bench(), self.window(cut, dtype), settings=settings, dtype=dtype)
            differences.append(Difference.between(trace, reference, scale))
            traces.append(trace)
            references.append(reference)
        sharp, single = differences
        verdict = judge(sharp, single, micro_batches=len(cut), tolerance=TOLERANCE)
        return CutDiagnosis(
            cut=cut,
            sharp=sharp,
            single=single,
            verdict=verdict,
            optimizer_steps=traces[0].optimizer_steps,
            mistake=self.mistake(cut, traces[0], clip_norm, right_once=verdict.equivalent),
            clip_norm=clip_norm,
            parameters=tuple(_by_parameter(traces[0], references[0])),
        )

    def mistake(self, cut: tuple[int, ...], trace: Trace, clip_norm: float | None, *, right_once: bool) -> str:
        """What the loop does wrong, in words; empty where it is right, or only model and objective are to blame."""
        window = self.window(cut, torch.float64)
        named = "" if clip_norm else name_the_mistake(trace, self.model, self.objective, window=window)
        if not named and right_once:
            named = next_window_differs(self, cut, clip_norm)
        if not named and self.dropouts and runs_in_evaluation_mode(self, cut):
            return f"the model runs in evaluation mode, in which {', '.join(self.dropouts)} does nothing"
        return named

    def trace(self, step: Step, cut: Sequence[int], dtype: torch.dtype, *, default_loss: float = float("nan")) -> Trace:
        """What the step did; a loop that returns no loss is not judged by it."""

        def with_loss(model: nn.Module, optimizer: Optimizer, window: Sequence[Batch]) -> Tensor:
            loss = step(model, optimizer, window)
            if isinstance(loss, Tensor) and loss.numel() != 1:
                raise UnjudgedError(
                    f"the step returned a tensor of shape {tuple(loss.shape)}. Return the window's mean loss, or none."
                )
            told = loss if isinstance(loss, Tensor | float) else default_loss
            return torch.as_tensor(told, dtype=torch.float64)

        return take_step(self.bench(), with_loss, self.window(cut, dtype), settings=SETTINGS, dtype=dtype)


def full_batch_gradient(model: nn.Module, objective: Objective, whole: Batch) -> list[Tensor]:
    loss = objective.share(model, whole, objective.totals([whole]))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [part for part in torch.autograd.grad(loss, parameters, allow_unused=True) if part is not None]


def _by_parameter(trace: Trace, reference: Trace) -> Iterator[ParameterDifference]:
    def compare(name: str) -> ParameterDifference:
        zero = torch.zeros((), dtype=torch.float64)
        found, expected = trace.gradients.get(name, zero), reference.gradients.get(name, zero)
        size = norm({name: expected})
        return ParameterDifference(name, ratio(norm({name: found - expected}), size), ratio(norm({name: found}), size))

    yield from sorted(map(compare, reference.gradients), key=lambda each: -each.relative_difference)

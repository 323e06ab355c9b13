"""Training arms on equal samples: every arm sees the same samples in the same order, whatever its effective batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise
from statistics import fmean

import torch
from torch import nn

from gradaccum.engine.accumulator import Accumulator
from gradaccum.engine.batching import Batch, BatchPlan, to, windows
from gradaccum.engine.noise_estimate import WindowNoise
from gradaccum.engine.noise_scale import NoiseScale
from gradaccum.engine.objective import Objective
from gradaccum.measurements.bench import Bench, consecutive, make_optimizer
from gradaccum.measurements.rules import Decay, decayed, warm_up
from gradaccum.measurements.setup import SGD, AdamW

MOST_EVALUATIONS = 24
"""On the held-out samples, along one run."""

VALIDATION_BATCH = 64


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        name: tells arms of the same effective batch apart.
        plan: how the effective batch is reached.
        settings: of the optimizer, its learning rate the one after warm-up.
        warmup_samples: over which the learning rate rises from `warmup_start` times itself.
        decay: how it falls, over all samples of the run.
    """

    name: str
    plan: BatchPlan
    settings: SGD | AdamW
    warmup_samples: float = 0.0
    warmup_start: float = 1.0
    decay: Decay = "none"


@dataclass(frozen=True)
class Evaluation:
    """Where a run stands; all is None after it diverged.

    Attributes:
        train_loss: mean over the windows since the last evaluation, those without a target left out; None where there
            was none.
    """

    samples: int
    steps: int
    train_loss: float | None
    validation_loss: float | None
    validation_accuracy: float | None
    noise: tuple[WindowNoise, ...] = ()


@dataclass(frozen=True)
class Run:
    """One arm trained with one seed.

    Attributes:
        evaluations: from before the first step to the end, at the same samples in every arm.
        diverged_at_step: the first step whose loss was not finite; None if all were.
    """

    evaluations: tuple[Evaluation, ...]
    diverged_at_step: int | None

    @property
    def final(self) -> Evaluation:
        return self.evaluations[-1]

    @property
    def noise(self) -> list[WindowNoise]:
        """What each window told, along the run; empty with one micro-batch a window."""
        return [window for evaluation in self.evaluations for window in evaluation.noise]

    @property
    def failed(self) -> bool:
        """Diverged, or ended worse than it began."""
        began, ended = self.evaluations[0].validation_loss, self.final.validation_loss
        assert began is not None
        return ended is None or ended > began


def evaluation_points(samples: int, effective_batches: Sequence[int]) -> list[int]:
    """Numbers of samples at which every arm has finished a window, evenly spaced, the last one `samples`."""
    common = math.lcm(*effective_batches)
    whole = samples // common
    every = next(count for count in range(1, whole + 1) if whole % count == 0 and whole // count <= MOST_EVALUATIONS)
    return list(range(0, samples + 1, every * common))


@dataclass(frozen=True)
class Trainer:
    """Trains with one seed, on micro-batches prepared once for all arms."""

    bench: Bench
    micro_batch: int
    points: Sequence[int]

    @classmethod
    def with_seed(cls, bench: Bench, seed: int, *, micro_batch: int, points: Sequence[int]) -> Trainer:
        return cls(replace(bench, seed=seed), micro_batch, points)

    @cached_property
    def micro_batches(self) -> list[Batch]:
        order = self.bench.order(self.points[-1])
        return [self.bench.micro_batch(indices) for indices in consecutive(order, self.micro_batch)]

    @cached_property
    def validation(self) -> list[Batch]:
        workload = self.bench.workload
        samples = range(len(workload.validation))
        pieces = consecutive(samples, VALIDATION_BATCH)
        return [
            to(workload.collate([workload.validation[index] for index in piece]), self.bench.device) for piece in pieces
        ]

    def train(self, arm: Arm) -> Run:
        """Deterministic; a run that diverges is evaluated no more."""
        model = self.bench.model()
        accumulator = self.accumulator(model, arm)
        remaining = enumerate(windows(self.micro_batches, arm.plan.accum_steps))
        evaluations = [self.evaluate(model, samples=0, steps=0)]
        for before, samples in pairwise(self.points):
            steps = (samples - before) // arm.plan.effective_batch
            noise = NoiseScale()
            accumulator.observer = noise if self.observes(arm) else None
            losses = list(self.finite_losses(accumulator, arm, islice(remaining, steps)))
            if len(losses) < steps:
                diverged = evaluations[-1].steps + len(losses) + 1
                return Run((*evaluations, *self.lost(arm, after=before)), diverged)
            evaluation = self.evaluate(model, samples=samples, steps=samples // arm.plan.effective_batch)
            evaluations.append(replace(evaluation, train_loss=mean_of(losses), noise=tuple(noise.windows())))
        return Run(tuple(evaluations), None)

    def observes(self, arm: Arm) -> bool:
        """The noise scale shows between micro-batches, and where the loss has one count."""
        return arm.plan.accum_steps > 1 and self.bench.workload.objective.weights is None

    def accumulator(self, model: nn.Module, arm: Arm) -> Accumulator:
        optimizer = make_optimizer(model, arm.settings)
        return Accumulator(model, optimizer, self.bench.workload.objective, clip_norm=arm.settings.clip_norm)

    def finite_losses(
        self, accumulator: Accumulator, arm: Arm, these: Iterator[tuple[int, Sequence[Batch]]]
    ) -> Iterator[float | None]:
        """The loss of each window, None where it has no target, up to the first that is not finite.

        The learning rate follows the samples seen, not the steps applied, of which a window without targets is none:
        arms would not decay together.
        """
        for number, window in these:
            for group in accumulator.optimizer.param_groups:
                group["lr"] = arm.settings.lr * lr_factor(arm, self.points[-1], number)
            step = accumulator.step(window)
            loss = float(step.loss) if step.applied else None
            if loss is not None and not math.isfinite(loss):
                return
            yield loss

    @torch.no_grad()
    def evaluate(self, model: nn.Module, *, samples: int, steps: int) -> Evaluation:
        """Mean loss over the held-out targets, and the share of them that is right."""
        workload = self.bench.workload
        model.eval()
        loss, count = mean_loss(workload.objective, model, self.validation)
        right = sum(float(workload.correct(model, batch)) for batch in self.validation) if workload.correct else None
        model.train()
        return Evaluation(
            samples,
            steps,
            train_loss=None,
            validation_loss=loss if math.isfinite(loss) else None,
            validation_accuracy=None if right is None else right / count,
        )

    def lost(self, arm: Arm, *, after: int) -> Iterator[Evaluation]:
        for samples in self.points:
            if samples > after:
                yield Evaluation(samples, samples // arm.plan.effective_batch, None, None, None)


def mean_loss(objective: Objective, model: nn.Module, batches: Sequence[Batch]) -> tuple[float, float]:
    """Over all targets of all batches, each term by its own; and the targets of the first term."""
    counts = objective.totals(batches)
    losses = [objective.loss_sums(model, batch) for batch in batches]
    sums = [sum(float(loss) for loss in of_term) for of_term in zip(*losses, strict=True)]
    terms = zip(objective.terms.values(), sums, counts, strict=True)
    return sum(weight * loss / count for weight, loss, count in terms if count), counts[0]


def lr_factor(arm: Arm, all_samples: int, steps: int) -> float:
    """After so many windows."""
    samples = steps * arm.plan.effective_batch
    risen = warm_up(samples, over=arm.warmup_samples, start=arm.warmup_start)
    return risen * decayed(samples, over=all_samples, decay=arm.decay)


def mean_of(losses: Iterable[float | None]) -> float | None:
    """Of those that are there; None where none is."""
    known = [loss for loss in losses if loss is not None]
    return fmean(known) if known else None

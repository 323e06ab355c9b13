"""What arms did over all seeds, compared at equal samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

from gradaccum.engine.noise_estimate import NoiseScaleEstimate, estimate, in_parts
from gradaccum.measurements.bench import Bench
from gradaccum.measurements.setup import AdamW, Progress
from gradaccum.measurements.training import Arm, Evaluation, Run, Trainer, evaluation_points
from gradaccum.results.intervals import Interval, first_reached, mean_interval
from gradaccum.results.sentences import QUARTERS


@dataclass(frozen=True)
class Stand:
    """An arm at one evaluation, over all seeds."""

    samples: int
    steps: int
    validation_loss: Interval | None
    validation_accuracy: Interval | None
    train_loss: Interval | None


@dataclass(frozen=True)
class ArmResult:
    """One arm, trained once with each seed."""

    arm: Arm
    runs: tuple[Run, ...]

    @property
    def effective_batch(self) -> int:
        return self.arm.plan.effective_batch

    @property
    def failed_runs(self) -> int:
        """Runs that diverged, or ended worse than they began."""
        return sum(run.failed for run in self.runs)

    @property
    def diverged_at_step(self) -> int | None:
        """The earliest, over the seeds."""
        return min((run.diverged_at_step for run in self.runs if run.diverged_at_step is not None), default=None)

    def over_seeds(self, of: Callable[[Evaluation], float | None], at: int = -1) -> Interval | None:
        """Of one number at one evaluation; None where a seed has none."""
        values = [of(run.evaluations[at]) for run in self.runs]
        known = [value for value in values if value is not None]
        return mean_interval(known) if len(known) == len(values) else None

    @cached_property
    def noise(self) -> list[NoiseScaleEstimate]:
        """The noise scale over all seeds, in each quarter of training; empty where some seed cannot tell it."""
        runs = [run.noise for run in self.runs]
        if self.failed_runs or min(map(len, runs)) < len(QUARTERS):
            return []
        return [estimate(*parts) for parts in zip(*(in_parts(run, len(QUARTERS)) for run in runs), strict=True)]

    def samples_to(self, loss: float) -> Interval | None:
        """After how many samples the validation loss is down to that much; None where some seed never is."""
        reached = [
            first_reached(
                [evaluation.samples for evaluation in run.evaluations],
                [evaluation.validation_loss for evaluation in run.evaluations],
                loss,
            )
            for run in self.runs
        ]
        known = [samples for samples in reached if samples is not None]
        if len(known) < len(reached):
            return None
        return mean_interval(known).at_least(0.0)

    @cached_property
    def learning(self) -> list[Stand]:
        """Where the arm stands at each evaluation."""
        return [
            Stand(
                samples=evaluation.samples,
                steps=evaluation.steps,
                validation_loss=self.over_seeds(validation_loss, at),
                validation_accuracy=self.over_seeds(validation_accuracy, at),
                train_loss=self.over_seeds(train_loss, at),
            )
            for at, evaluation in enumerate(self.runs[0].evaluations)
        ]


def train_arms(
    bench: Bench, arms: Sequence[Arm], *, seeds: Sequence[int], samples: int, progress: Progress
) -> list[ArmResult]:
    """Every arm with every seed; with one seed, all arms begin with the same parameters and see the same samples."""
    points = evaluation_points(samples, [arm.plan.effective_batch for arm in arms])
    trainers = [Trainer.with_seed(bench, seed, micro_batch=arms[0].plan.micro_batch, points=points) for seed in seeds]
    pairs = [(arm, trainer) for trainer in trainers for arm in arms]
    runs = [trainer.train(arm) for arm, trainer in progress(pairs, "training")]
    return [ArmResult(arm, tuple(runs[index :: len(arms)])) for index, arm in enumerate(arms)]


def validation_loss(evaluation: Evaluation) -> float | None:
    return evaluation.validation_loss


def validation_accuracy(evaluation: Evaluation) -> float | None:
    return evaluation.validation_accuracy


def train_loss(evaluation: Evaluation) -> float | None:
    return evaluation.train_loss


def excess(one: ArmResult, other: ArmResult) -> Interval | None:
    """How much more validation loss `one` ends with than `other`, seed by seed; None where one of them failed."""
    if one.failed_runs or other.failed_runs:
        return None
    pairs = [
        (mine.final.validation_loss, theirs.final.validation_loss)
        for mine, theirs in zip(one.runs, other.runs, strict=True)
    ]
    differences = [mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None]
    return mean_interval(differences)


def is_worse(one: ArmResult, other: ArmResult) -> bool:
    """Whether `one` failed with some seed, or its loss exceeds the other's by more than the interval."""
    more = excess(one, other)
    return one.failed_runs > 0 or more is None or more.low > 0


def ended(result: ArmResult) -> Interval | None:
    """The validation loss; None where a seed failed, for a mean that one seed blew up says nothing of an arm."""
    return None if result.failed_runs else result.over_seeds(validation_loss)


def point(result: ArmResult, series: str) -> dict[str, Any]:
    """What every curve says of an arm."""
    arm, settings = result.arm, result.arm.settings
    return {
        "series": series,
        "effective_batch": arm.plan.effective_batch,
        "accum_steps": arm.plan.accum_steps,
        "micro_batch": arm.plan.micro_batch,
        "world_size": arm.plan.world_size,
        "lr": settings.lr,
        "beta2": settings.betas[1] if isinstance(settings, AdamW) else None,
        "steps": result.runs[0].final.steps,
        **fields(ended(result), "validation_loss"),
        **fields(result.over_seeds(validation_accuracy), "validation_accuracy"),
        **fields(result.over_seeds(train_loss), "train_loss"),
        "seeds": len(result.runs),
        "failed_runs": result.failed_runs,
        "diverged_at_step": result.diverged_at_step,
    }


def fields(interval: Interval | None, name: str) -> dict[str, Any]:
    return interval.fields(name) if interval else dict.fromkeys((name, f"{name}_low", f"{name}_high"))


def noise_fields(noise: Sequence[NoiseScaleEstimate]) -> dict[str, float | None]:
    """By quarter of training; null where there is none, and where it is infinite."""
    found: dict[str, float | None] = {}
    for name, each in zip_longest(QUARTERS, noise):
        values = (each.noise_scale, each.low, each.high) if each else (None, None, None)
        for ending, value in zip(("", "_low", "_high"), values, strict=True):
            found[f"{name}{ending}"] = value if value is not None and math.isfinite(value) else None
    return found

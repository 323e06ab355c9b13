"""The ablation's computation: each variant's first step, and its training run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from gradaccum.measurements.ablation import Config
from gradaccum.measurements.bench import Bench, consecutive, equal_cut, make_optimizer
from gradaccum.measurements.comparison import (
    Trace,
    TrainingStep,
    difference,
    full_batch_step,
    largest,
    norm,
    take_step,
)
from gradaccum.measurements.setup import SGD, AdamW, OptimizerName, Progress, Setup
from gradaccum.measurements.variants import VARIANTS, Variant
from gradaccum.results.curve import Curve
from gradaccum.results.outcome import Outcome, StepSeries

CONTROL = "scaled_at_n_times_lr"
"""The engine at N times the learning rate: what the naive loop really is, under SGD."""

EXACT = 1e-9
"""Bound on relative differences that are zero but for float64's rounding."""


@dataclass(frozen=True)
class Arm:
    """One variant under one optimizer at one number of accumulation steps."""

    optimizer: OptimizerName
    name: str
    accum_steps: int

    @property
    def series(self) -> str:
        return f"{self.optimizer}/{self.name}"

    @property
    def variant(self) -> Variant:
        return VARIANTS["scaled" if self.name == CONTROL else self.name]


@dataclass(frozen=True)
class Shown:
    """What an arm did.

    Attributes:
        grad_norm_ratio: at step 1, over the full batch's; None where a window has no single gradient.
        param_diff_step1: largest difference of a parameter from the full batch's after step 1.
        losses: mean loss of each window, up to where it stopped being finite.
        diverged_at_step: first window, from 1, whose loss was not finite; None if all were.
    """

    arm: Arm
    grad_norm_ratio: float | None
    param_diff_step1: float
    losses: tuple[float, ...]
    diverged_at_step: int | None


def measure_mistakes(config: Config, setup: Setup, progress: Progress) -> Outcome:
    """See `gradaccum.measurements.ablation.measure`."""
    trainer = Trainer(Bench.prepare(setup), config, setup)
    shown = [trainer.show(arm) for arm in progress(arms(config), "ablation")]
    gaps = {each.arm.accum_steps: trainer.control_gap(each.arm) for each in shown if each.arm.name == CONTROL}
    points = tuple(point(each, config) for each in shown)
    return Outcome(
        metrics=headline(shown, config) | {f"sgd/{CONTROL}/gap_to_naive": gaps[max(gaps)] for _ in gaps},
        curve=Curve("ablation", "accum_steps", points),
        summary=[row(each) for each in shown if each.arm.accum_steps == max(config.accum_steps)],
        findings=list(findings(shown, gaps)),
        failures=[*failures(shown, trainer), *control_failures(gaps)],
        tables={"losses": list(loss_table(shown))},
        series=[loss_series(each, config.num_steps) for each in shown],
    )


def arms(config: Config) -> list[Arm]:
    """All variants on the same grid, and with them what they are compared with."""
    names: list[str] = list(config.variants)
    if "mean_of_means" in names:
        names.append("scaled_ragged")
    found = [Arm(opt, name, steps) for opt in config.optimizers for name in names for steps in config.accum_steps]
    if "naive" in names and "sgd" in config.optimizers:
        found += [Arm("sgd", CONTROL, steps) for steps in config.accum_steps]
    return found


class Trainer:
    """Runs arms on the same samples in the same order."""

    def __init__(self, bench: Bench, config: Config, setup: Setup) -> None:
        self.bench, self.config, self.setup = bench, config, setup
        order = bench.order(config.effective_batch * config.num_steps)
        self.windows = list(consecutive(order, config.effective_batch))

    def show(self, arm: Arm) -> Shown:
        ratio, param_diff = self.first_step(arm)
        losses, diverged = self.train(arm)
        return Shown(arm, ratio if arm.variant.one_gradient else None, param_diff, losses, diverged)

    def first_step(self, arm: Arm) -> tuple[float, float]:
        """Gradient norm over, and largest parameter difference from, the full batch's (clipped where the arm clips)."""
        clip_norm = self.config.clip_norm if arm.variant.clipped else None
        full = full_batch_step(self.bench.workload.objective, clip_norm)
        reference = self.one_step(full, [self.config.effective_batch], self.setup.optimizers.settings(arm.optimizer))
        one = self.one_step(self.step(arm), self.cut(arm), self.settings(arm))
        ratio = norm(one.gradients) / norm(reference.gradients)
        return ratio, largest(difference(one.parameters, reference.parameters))[1]

    def control_gap(self, control: Arm) -> float:
        """Largest parameter difference between the naive loop and the control after step 1, over the norm."""
        naive = Arm(control.optimizer, "naive", control.accum_steps)
        one, other = (self.one_step(self.step(arm), self.cut(arm), self.settings(arm)) for arm in (naive, control))
        return largest(difference(one.parameters, other.parameters))[1] / norm(one.parameters)

    def one_step(self, step: TrainingStep, cut: Sequence[int], settings: SGD | AdamW) -> Trace:
        window = self.bench.window(self.windows[0], cut, torch.float64)
        return take_step(self.bench, step, window, settings=settings, dtype=torch.float64)

    def counts_are_equal(self, arm: Arm) -> bool:
        window = self.bench.window(self.windows[0], self.cut(arm))
        return len({float(self.bench.workload.objective.count(batch)) for batch in window}) == 1

    def train(self, arm: Arm) -> tuple[tuple[float, ...], int | None]:
        """Losses of all windows, and the first window whose loss was not finite."""
        model = self.bench.model()
        optimizer = make_optimizer(model, self.settings(arm))
        step = self.step(arm)
        losses: list[float] = []
        for number, indices in enumerate(self.windows, start=1):
            loss = float(step(model, optimizer, self.bench.window(indices, self.cut(arm))))
            if not math.isfinite(loss):
                return tuple(losses), number
            losses.append(loss)
        return tuple(losses), None

    def step(self, arm: Arm) -> TrainingStep:
        return arm.variant.step(self.bench.workload.objective, self.config.clip_norm)

    def settings(self, arm: Arm) -> SGD | AdamW:
        settings = self.setup.optimizers.settings(arm.optimizer)
        if arm.name != CONTROL or isinstance(settings, AdamW):
            return settings
        times = arm.accum_steps  # weight decay pulls as before, since it is multiplied by the learning rate too
        return SGD(lr=settings.lr * times, momentum=settings.momentum, weight_decay=settings.weight_decay / times)

    def cut(self, arm: Arm) -> list[int]:
        make = ragged_cut if arm.variant.ragged else equal_cut
        return make(self.config.effective_batch, arm.accum_steps)


def ragged_cut(effective_batch: int, accum_steps: int) -> list[int]:
    """Micro-batches of at least one sample whose sizes rise evenly.

    >>> ragged_cut(16, 4)
    [2, 3, 5, 6]
    """
    spare = effective_batch - accum_steps
    edges = [spare * step * (step + 1) // (accum_steps * (accum_steps + 1)) for step in range(accum_steps + 1)]
    return [1 + after - before for before, after in pairwise(edges)]


def headline(shown: Sequence[Shown], config: Config) -> dict[str, Any]:
    """At the largest number of accumulation steps."""
    metrics: dict[str, Any] = {}
    for each in shown:
        if each.arm.accum_steps == max(config.accum_steps):
            metrics[f"{each.arm.series}/grad_norm_ratio"] = each.grad_norm_ratio
            metrics[f"{each.arm.series}/param_diff_step1"] = each.param_diff_step1
            metrics[f"{each.arm.series}/final_loss"] = None if each.diverged_at_step else each.losses[-1]
            metrics[f"{each.arm.series}/diverged_at_step"] = each.diverged_at_step
    return metrics


def point(each: Shown, config: Config) -> dict[str, Any]:
    cut = ragged_cut(config.effective_batch, each.arm.accum_steps) if each.arm.variant.ragged else None
    return {
        "series": each.arm.series,
        "effective_batch": config.effective_batch,
        "accum_steps": each.arm.accum_steps,
        "micro_batch": None if cut else config.effective_batch // each.arm.accum_steps,
        "world_size": 1,
        "cut": cut,
        "grad_norm_ratio": each.grad_norm_ratio,
        "param_diff_step1": each.param_diff_step1,
        "final_loss": None if each.diverged_at_step else each.losses[-1],
        "diverged_at_step": each.diverged_at_step,
    }


def row(each: Shown) -> dict[str, Any]:
    diverged = each.diverged_at_step
    return {
        "variant": each.arm.series,
        "N": each.arm.accum_steps,
        "grad norm ratio": each.grad_norm_ratio,
        "param diff at step 1": each.param_diff_step1,
        "final loss": f"diverged at step {diverged}" if diverged else each.losses[-1],
    }


def loss_series(each: Shown, num_steps: int) -> StepSeries:
    values = [*each.losses, *[None] * (num_steps - len(each.losses))]
    return StepSeries(f"{each.arm.series}/loss/n{each.arm.accum_steps}", range(1, num_steps + 1), values)


def loss_table(shown: Sequence[Shown]) -> Iterator[dict[str, Any]]:
    for each in shown:
        for step, loss in enumerate(each.losses, start=1):
            yield {"series": each.arm.series, "accum_steps": each.arm.accum_steps, "step": step, "loss": loss}


def findings(shown: Sequence[Shown], gaps: Mapping[int, float]) -> Iterator[str]:
    by_arm = {each.arm: each for each in shown}
    most = max(each.arm.accum_steps for each in shown)
    naive = [each for each in shown if each.arm.name == "naive" and each.arm.optimizer == shown[0].arm.optimizer]
    if naive:
        times = ", ".join(f"{each.grad_norm_ratio:.9g} at N={each.arm.accum_steps}" for each in naive)
        yield f"The naive gradient over the right one: {times}."
    for optimizer in dict.fromkeys(each.arm.optimizer for each in shown):
        for right, wrong in (("scaled", "naive"), ("scaled_clipped", "naive_clipped")):
            pair = [by_arm.get(Arm(optimizer, name, most)) for name in (right, wrong)]
            if pair[0] and pair[1]:
                ends = f"{wrong} {ending(pair[1])}, {right} {ending(pair[0])}"
                yield f"{optimizer} at N={most}: {ends}.{REMARKS[optimizer, wrong]}"
    if gaps:
        yield (
            f"Control: naive SGD is the engine at N times the learning rate: after step 1 their parameters differ by "
            f"at most {max(gaps.values()):.0e} of their norm."
        )


REMARKS = {
    ("sgd", "naive"): " SGD's update grows with the gradient; at a small learning rate it need not break.",
    ("sgd", "naive_clipped"): " Clipping caps the damage: every naive gradient is cut to clip_norm.",
    ("adamw", "naive"): " AdamW's update ignores the gradient's scale, so the mistake hides.",
    ("adamw", "naive_clipped"): " Once gradients are clipped, the mistake changes AdamW's updates too.",
}


def ending(each: Shown) -> str:
    return (
        f"diverges at step {each.diverged_at_step}" if each.diverged_at_step else f"ends at loss {each.losses[-1]:.4g}"
    )


def failures(shown: Sequence[Shown], trainer: Trainer) -> Iterator[str]:
    """Claims about ratios, where a variant's cut lets them be exact."""
    for each in shown:
        expected = {"scaled": 1, "scaled_ragged": 1, "naive": each.arm.accum_steps}.get(each.arm.name)
        if expected is None or each.grad_norm_ratio is None:
            continue
        if each.arm.name == "naive" and not trainer.counts_are_equal(each.arm):
            continue
        if not math.isclose(each.grad_norm_ratio, expected, rel_tol=EXACT):
            yield (
                f"{each.arm.series} at N={each.arm.accum_steps}: the gradient's norm is {each.grad_norm_ratio:.12g} "
                f"times the full batch's, expected {expected}."
            )


def control_failures(gaps: Mapping[int, float]) -> Iterator[str]:
    for steps, gap in gaps.items():
        if not gap < EXACT:
            yield f"naive SGD at N={steps} differs from the engine at {steps} times the learning rate by {gap:.1e}."

"""The ablation's computation: each variant's first step, and its training run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from gradaccum.errors import ConfigError
from gradaccum.measurements.ablation import Config
from gradaccum.measurements.bench import Bench, consecutive, equal_cut, make_optimizer
from gradaccum.measurements.comparison import (
    Trace,
    TrainingStep,
    difference,
    full_batch_step,
    largest,
    norm,
    require_finite,
    take_step,
)
from gradaccum.measurements.setup import SGD, AdamW, OptimizerName, Setup
from gradaccum.measurements.variants import VARIANTS, Variant

CONTROL = "scaled_at_n_times_lr"
"""The engine at N times the learning rate: what the naive loop really is, under SGD."""


@dataclass(frozen=True)
class VariantArm:
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

    arm: VariantArm
    grad_norm_ratio: float | None
    param_diff_step1: float
    losses: tuple[float, ...]
    diverged_at_step: int | None


def arms(config: Config) -> list[VariantArm]:
    """All variants on the same grid, and with them what they are compared with."""
    names: list[str] = list(config.variants)
    if "mean_of_means" in names:
        names.append("scaled_ragged")
    found = [
        VariantArm(opt, name, steps) for opt in config.optimizers for name in names for steps in config.accum_steps
    ]
    if "naive" in names and "sgd" in config.optimizers:
        found += [VariantArm("sgd", CONTROL, steps) for steps in config.accum_steps]
    return found


class VariantTrainer:
    """Runs arms on the same samples in the same order."""

    def __init__(self, bench: Bench, config: Config, setup: Setup) -> None:
        self.bench, self.config, self.setup = bench, config, setup
        order = bench.order(config.effective_batch * config.num_steps)
        self.windows = list(filter(self.has_target, consecutive(order, config.effective_batch)))
        if not self.windows:
            raise ConfigError(
                f"none of the {config.num_steps} windows of {config.effective_batch} samples has a target, so no loop "
                "can learn anything. Raise ablation.effective_batch or ablation.num_steps."
            )

    def has_target(self, indices: Sequence[int]) -> bool:
        """A window without one, which the engine skips, tells nothing of a mistake: none of the loops sees it."""
        return any(self.bench.workload.objective.totals(self.bench.window(indices, [len(indices)])))

    def show(self, arm: VariantArm) -> Shown:
        ratio, param_diff = self.first_step(arm)
        losses, diverged = self.train(arm)
        return Shown(arm, ratio if arm.variant.one_gradient else None, param_diff, losses, diverged)

    def first_step(self, arm: VariantArm) -> tuple[float, float]:
        """Gradient norm over, and largest parameter difference from, the full batch's (clipped where the arm clips)."""
        clip_norm = self.config.clip_norm if arm.variant.clipped else None
        full = full_batch_step(self.bench.workload.objective, clip_norm)
        reference = self.one_step(full, [self.config.effective_batch], self.setup.optimizers.settings(arm.optimizer))
        one = self.one_step(self.step(arm), self.cut(arm), self.settings(arm))
        for each in (reference, one):
            require_finite(each, arm.optimizer, self.setup.optimizers.settings(arm.optimizer))
        ratio = norm(one.gradients) / norm(reference.gradients)
        return ratio, largest(difference(one.parameters, reference.parameters))[1]

    def control_gap(self, control: VariantArm) -> float:
        """Largest parameter difference between the naive loop and the control after step 1, over the norm."""
        naive = VariantArm(control.optimizer, "naive", control.accum_steps)
        one, other = (self.one_step(self.step(arm), self.cut(arm), self.settings(arm)) for arm in (naive, control))
        return largest(difference(one.parameters, other.parameters))[1] / norm(one.parameters)

    def one_step(self, step: TrainingStep, cut: Sequence[int], settings: SGD | AdamW) -> Trace:
        window = self.bench.window(self.windows[0], cut, torch.float64)
        return take_step(self.bench, step, window, settings=settings, dtype=torch.float64)

    def counts_are_equal(self, arm: VariantArm) -> bool:
        window = self.bench.window(self.windows[0], self.cut(arm))
        return len({tuple(self.bench.workload.objective.totals([batch])) for batch in window}) == 1

    def train(self, arm: VariantArm) -> tuple[tuple[float, ...], int | None]:
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

    def step(self, arm: VariantArm) -> TrainingStep:
        return arm.variant.step(self.bench.workload.objective, self.config.clip_norm)

    def settings(self, arm: VariantArm) -> SGD | AdamW:
        settings = self.setup.optimizers.settings(arm.optimizer)
        if arm.name != CONTROL or isinstance(settings, AdamW):
            return settings
        times = arm.accum_steps  # weight decay pulls as before, since it is multiplied by the learning rate too
        return SGD(lr=settings.lr * times, momentum=settings.momentum, weight_decay=settings.weight_decay / times)

    def cut(self, arm: VariantArm) -> list[int]:
        make = ragged_cut if arm.variant.ragged else equal_cut
        return make(self.config.effective_batch, arm.accum_steps)


def ragged_cut(effective_batch: int, accum_steps: int) -> list[int]:
    """Micro-batches of at least one sample whose sizes rise.

    >>> ragged_cut(16, 4)
    [2, 3, 5, 6]
    """
    spare = effective_batch - accum_steps
    edges = [spare * step * (step + 1) // (accum_steps * (accum_steps + 1)) for step in range(accum_steps + 1)]
    return sorted(1 + after - before for before, after in pairwise(edges))

"""The throughput measurement's computation: rounds over all points, each step timed."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from gradaccum.engine.accumulator import Accumulator, StepResult
from gradaccum.engine.batching import Batch, BatchPlan, windows
from gradaccum.measurements.bench import Bench, consecutive, make_optimizer
from gradaccum.measurements.setup import Progress, Setup
from gradaccum.measurements.throughput import Config
from gradaccum.results.curve import Curve
from gradaccum.results.fits import StepTimeFit, fit_step_time
from gradaccum.results.outcome import Outcome

WARM_UP = 3
"""Untimed steps before the timed ones of a round: they pay for first allocations."""


@dataclass(frozen=True)
class TimedStep:
    """One optimizer step."""

    result: StepResult
    wall_ms: float


@dataclass(frozen=True)
class Point:
    """All timed steps of one point, over all rounds."""

    plan: BatchPlan
    steps: tuple[TimedStep, ...]

    @property
    def wall_ms(self) -> list[float]:
        return [step.wall_ms for step in self.steps]

    @property
    def samples_per_sec(self) -> float:
        return 1000 * sum(step.result.samples for step in self.steps) / sum(self.wall_ms)

    @property
    def median_step_ms(self) -> float:
        return median(self.wall_ms)

    @property
    def sync_calls(self) -> int:
        return sum(step.result.sync_calls for step in self.steps)

    @property
    def avg_loss(self) -> float:
        return fmean(float(step.result.loss) for step in self.steps)


def sweep(config: Config, setup: Setup, progress: Progress) -> Outcome:
    """See `gradaccum.measurements.throughput.measure`."""
    timer = Timer(Bench.prepare(setup), config, setup)
    plans = [BatchPlan(config.micro_batch * steps, config.micro_batch) for steps in config.accum_steps]
    timed: dict[BatchPlan, list[TimedStep]] = {plan: [] for plan in plans}
    for plan in progress(shuffled_rounds(plans, config.repeats, seed=setup.seed), "throughput"):
        timed[plan] += timer.time(plan)
    points = [Point(plan, tuple(steps)) for plan, steps in timed.items()]
    fit = fit_step_time([each.plan.accum_steps for each in points], [each.median_step_ms for each in points])
    return Outcome(
        metrics=headline(points, fit, config),
        curve=Curve("throughput", "effective_batch", tuple(point(each, fit, config) for each in points)),
        summary=[row(each) for each in points],
        findings=list(findings(points, fit, config)),
        failures=list(failures(points)),
        tables={"steps": [step_row(each.plan, number, step) for each in points for number, step in numbered(each)]},
    )


def shuffled_rounds(plans: Sequence[BatchPlan], rounds: int, *, seed: int) -> list[BatchPlan]:
    """Every plan once a round, in an order of each round's own, so that the machine's drift spreads over all."""
    shuffle = random.Random(seed)
    return [plan for _ in range(rounds) for plan in shuffle.sample(plans, len(plans))]


class Timer:
    """Times a plan's steps; every round trains the same new model on the same micro-batches."""

    def __init__(self, bench: Bench, config: Config, setup: Setup) -> None:
        self.bench, self.config, self.setup = bench, config, setup
        order = bench.order(config.micro_batch * max(config.accum_steps) * (config.num_steps + WARM_UP))
        self.micro_batches = [bench.micro_batch(indices) for indices in consecutive(order, config.micro_batch)]

    def time(self, plan: BatchPlan) -> list[TimedStep]:
        settings = self.setup.optimizers.settings(self.config.optimizer)
        model = self.bench.model()
        accumulator = Accumulator(
            model, make_optimizer(model, settings), self.bench.workload.objective, clip_norm=settings.clip_norm
        )
        prepared = windows(self.micro_batches, plan.accum_steps)
        for _ in range(WARM_UP):
            accumulator.step(next(prepared))
        with quiet():
            return [self.timed(accumulator, next(prepared)) for _ in range(self.config.num_steps)]

    def timed(self, accumulator: Accumulator, window: Sequence[Batch]) -> TimedStep:
        self.wait()
        start = perf_counter()
        result = accumulator.step(window)
        self.wait()
        return TimedStep(result, 1000 * (perf_counter() - start))

    def wait(self) -> None:
        """Let the device finish; the CPU always has."""
        if self.bench.device.type == "cuda":
            torch.cuda.synchronize(self.bench.device)


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection while the clock runs."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def headline(points: Sequence[Point], fit: StepTimeFit, config: Config) -> dict[str, Any]:
    return {
        "peak_samples_per_sec": max(each.samples_per_sec for each in points),
        "asymptotic_samples_per_sec": fit.asymptotic_samples_per_sec(config.micro_batch),
        "t_micro_ms": fit.t_micro_ms,
        "t_step_ms": fit.t_step_ms,
        "max_rel_residual": fit.max_rel_residual,
        "flattens_at_effective_batch": config.micro_batch * fit.flattens_at_accum_steps(),
    }


def point(each: Point, fit: StepTimeFit, config: Config) -> dict[str, Any]:
    quarter, three_quarters = np.percentile(each.wall_ms, [25, 75]).tolist()
    return {
        "series": config.optimizer,
        "effective_batch": each.plan.effective_batch,
        "accum_steps": each.plan.accum_steps,
        "micro_batch": each.plan.micro_batch,
        "world_size": each.plan.world_size,
        "avg_loss": each.avg_loss,
        "samples_per_sec": each.samples_per_sec,
        "median_step_ms": each.median_step_ms,
        "step_ms_p25": quarter,
        "step_ms_p75": three_quarters,
        "fitted_step_ms": fit.step_ms(each.plan.accum_steps),
        "step_share": fit.step_share(each.plan.accum_steps),
        "sync_calls": each.sync_calls,
        "steps": len(each.steps),
    }


def row(each: Point) -> dict[str, Any]:
    return {
        "effective batch": each.plan.effective_batch,
        "micro x N": f"{each.plan.micro_batch} x {each.plan.accum_steps}",
        "samples/s": each.samples_per_sec,
        "median step ms": each.median_step_ms,
        "syncs": each.sync_calls,
        "steps": len(each.steps),
        "avg loss": each.avg_loss,
    }


def numbered(each: Point) -> Iterator[tuple[int, TimedStep]]:
    return enumerate(each.steps, start=1)


def step_row(plan: BatchPlan, number: int, step: TimedStep) -> dict[str, Any]:
    return {
        "step": number,
        "effective_batch": plan.effective_batch,
        "micro_batch": plan.micro_batch,
        "accum_steps": plan.accum_steps,
        "loss": float(step.result.loss),
        "grad_norm": float(step.result.grad_norm),
        "samples_per_sec": 1000 * step.result.samples / step.wall_ms,
        "wall_ms": step.wall_ms,
        "sync_calls": step.result.sync_calls,
    }


def findings(points: Sequence[Point], fit: StepTimeFit, config: Config) -> Iterator[str]:
    steps = fit.flattens_at_accum_steps()
    reach = "" if steps <= max(config.accum_steps) else ", beyond the points measured here"
    yield (
        f"The curve flattens at effective batch {config.micro_batch * steps} (N={steps}{reach}): from there, samples/s "
        f"are within 5 % of the asymptote, {fit.asymptotic_samples_per_sec(config.micro_batch):.0f}."
    )
    least, most = min(config.accum_steps), max(config.accum_steps)
    yield (
        f"Step time = N x {fit.t_micro_ms:.3g} ms + {fit.t_step_ms:.3g} ms (residuals to {fit.max_rel_residual:.1%}). "
        f"What is paid once a step is {fit.step_share(least):.0%} of it at N={least} and {fit.step_share(most):.0%} at "
        f"N={most}: that is what a larger N saves, and all of it."
    )


def failures(points: Sequence[Point]) -> Iterator[str]:
    for each in points:
        if each.sync_calls != len(each.steps):
            yield (
                f"N={each.plan.accum_steps}: gradients synced {each.sync_calls} times in {len(each.steps)} steps, "
                "not once a step."
            )

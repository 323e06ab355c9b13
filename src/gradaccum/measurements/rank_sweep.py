"""The distributed measurement's computation: every way's window against one process, then its steps timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gradaccum.engine.accumulator import Accumulator, StepResult
from gradaccum.engine.batching import Batch, BatchPlan, windows
from gradaccum.measurements.bench import Bench, consecutive, make_optimizer
from gradaccum.measurements.comparison import Scale, Trace, full_batch_step, scale_of, take_step
from gradaccum.measurements.distributed import Config
from gradaccum.measurements.setup import Progress, Setup
from gradaccum.measurements.spread import Way, even_share, mean_of_rank_means, spread, uneven_share, ways
from gradaccum.measurements.timing import WARM_UP, quiet, shuffled_rounds
from gradaccum.measurements.verdict import Difference, Verdict, judge

DTYPES = (torch.float64, torch.float32)

Share = Sequence[Sequence[int]]
Step = Callable[[nn.Module, Optimizer, Sequence[Batch]], Tensor]


@dataclass(frozen=True)
class Taken:
    """One window over ranks against the same samples as one batch on one process.

    Attributes:
        sharp, single: differences in float64 and in float32.
        optimizer_steps: of the rank whose number is farthest from 1.
    """

    name: str
    share: Share
    sharp: Difference
    single: Difference
    verdict: Verdict
    optimizer_steps: int


@dataclass(frozen=True)
class Timed:
    """All timed steps of one way at one plan, as rank 0 saw them."""

    way: Way
    plan: BatchPlan
    steps: Sequence[StepResult]
    wall_ms: Sequence[float]


@dataclass(frozen=True)
class Sweep:
    """Everything measured; `taken` by way and `accum_steps`, then what was shared out unevenly, and the control."""

    even: dict[tuple[Way, int], Taken]
    uneven: list[Taken]
    control: Taken
    timed: list[Timed]


def sweep(config: Config, setup: Setup, progress: Progress) -> Sweep:
    """See `gradaccum.measurements.distributed.measure`."""
    bench = Bench.prepare(setup)
    comparer, timer = Comparer(bench, config, setup), Timer(bench, config, setup)
    all_ways = ways(config.strategies)
    few = min(steps for steps in config.accum_steps if config.micro_batch * steps > 1)
    uneven = uneven_share(config.micro_batch, few, config.world_size)
    even = {
        (way, steps): comparer.compare(way, even_share(config.micro_batch, steps, config.world_size))
        for steps in config.accum_steps
        for way in all_ways
    }
    return Sweep(
        even=even,
        uneven=[comparer.compare(way, uneven) for way in all_ways],
        control=comparer.compare(Way("ddp", "last"), uneven, mistake=True),
        timed=timer.all(progress),
    )


@dataclass
class Comparer:
    """Takes one window in every way; one process's only once for each share and precision."""

    bench: Bench
    config: Config
    setup: Setup
    references: dict[Any, tuple[Trace, Scale]] = field(default_factory=dict)

    def compare(self, way: Way, share: Share, *, mistake: bool = False) -> Taken:
        settings = self.setup.optimizers.settings(self.config.optimizer)
        objective = self.bench.workload.objective

        def step(model: nn.Module, optimizer: Optimizer, window: Sequence[Batch]) -> Tensor:
            if mistake:
                return mean_of_rank_means(model, optimizer, window, objective=objective)
            return way.accumulator(model, optimizer, objective, settings=settings).step(window).loss

        sharp, single = (self.differ(way, share, step, dtype) for dtype in DTYPES)
        return Taken(
            name="control/mean_of_rank_means" if mistake else way.name,
            share=share,
            sharp=sharp[0],
            single=single[0],
            verdict=judge(sharp[0], single[0], micro_batches=sum(map(len, share)), tolerance=self.config.tolerance),
            optimizer_steps=farthest_from_one(single[1].optimizer_steps),
        )

    def differ(self, way: Way, share: Share, step: Step, dtype: torch.dtype) -> tuple[Difference, Trace]:
        sizes = [size for of_rank in share for size in of_rank]
        indices = self.bench.order(sum(sizes))
        start = sum(sum(of_rank) for of_rank in share[: dist.get_rank()])
        mine = share[dist.get_rank()]
        trace = take_step(
            self.bench,
            step,
            self.bench.window(indices[start : start + sum(mine)], mine, dtype),
            settings=self.setup.optimizers.settings(self.config.optimizer),
            dtype=dtype,
            wrap=partial(spread, strategy=way.strategy),
        )
        reference, scale = self.reference(indices, sizes, dtype)
        return Difference.between(trace, reference, scale), trace

    def reference(self, indices: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> tuple[Trace, Scale]:
        key = (tuple(sizes), dtype)
        if key not in self.references:
            settings = self.setup.optimizers.settings(self.config.optimizer)
            whole = full_batch_step(self.bench.workload.objective, settings.clip_norm)
            batch = self.bench.window(indices, [len(indices)], dtype)
            self.references[key] = (
                take_step(self.bench, whole, batch, settings=settings, dtype=dtype),
                scale_of(self.bench, self.bench.window(indices, sizes, dtype), settings=settings, dtype=dtype),
            )
        return self.references[key]


def farthest_from_one(count: int) -> int:
    """Of the counts on all ranks."""
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, count)
    return max(counts, key=lambda each: abs(each - 1))


class Timer:
    """Times steps; every round trains the same new models on the same micro-batches, dealt out to the ranks."""

    def __init__(self, bench: Bench, config: Config, setup: Setup) -> None:
        self.bench, self.config, self.setup = bench, config, setup
        world, rank = dist.get_world_size(), dist.get_rank()
        needed = config.micro_batch * max(config.accum_steps) * (config.num_steps + WARM_UP)
        pieces = list(consecutive(bench.order(needed * world), config.micro_batch))
        self.micro_batches = [bench.micro_batch(indices) for indices in pieces[rank::world]]

    def all(self, progress: Progress) -> list[Timed]:
        plans = [
            (
                way,
                BatchPlan(
                    self.config.micro_batch * steps * self.config.world_size,
                    self.config.micro_batch,
                    self.config.world_size,
                ),
            )
            for way in ways(self.config.strategies)
            for steps in self.config.accum_steps
        ]
        found: dict[tuple[Way, BatchPlan], tuple[list[StepResult], list[float]]] = {each: ([], []) for each in plans}
        for way, plan in progress(shuffled_rounds(plans, self.config.repeats, seed=self.setup.seed), "distributed"):
            for result, wall_ms in self.time(way, plan):
                found[way, plan][0].append(result)
                found[way, plan][1].append(wall_ms)
        return [Timed(way, plan, *steps) for (way, plan), steps in found.items()]

    def time(self, way: Way, plan: BatchPlan) -> list[tuple[StepResult, float]]:
        settings = self.setup.optimizers.settings(self.config.optimizer)
        model = spread(self.bench.model(), way.strategy)
        accumulator = way.accumulator(
            model, make_optimizer(model, settings), self.bench.workload.objective, settings=settings
        )
        prepared = windows(self.micro_batches, plan.accum_steps, ranks="own")
        for _ in range(WARM_UP):
            accumulator.step(next(prepared))
        with quiet():
            return [self.timed(accumulator, next(prepared)) for _ in range(self.config.num_steps)]

    def timed(self, accumulator: Accumulator, window: Sequence[Batch]) -> tuple[StepResult, float]:
        dist.barrier()  # so that no rank's time holds another's delay
        start = perf_counter()
        result = accumulator.step(window)
        if self.bench.device.type == "cuda":
            torch.cuda.synchronize(self.bench.device)
        return result, 1000 * (perf_counter() - start)

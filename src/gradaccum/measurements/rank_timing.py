"""Optimizer steps timed over ranks, in shuffled rounds of visits that all ranks make together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from time import perf_counter

import torch
import torch.distributed as dist

from gradaccum.engine.accumulator import Accumulator, StepResult
from gradaccum.engine.batching import Batch, BatchPlan, windows
from gradaccum.engine.exchange import exchange
from gradaccum.measurements.bench import Bench, consecutive, make_optimizer
from gradaccum.measurements.distributed import Config
from gradaccum.measurements.points import StepTime, TimedStep, Visit
from gradaccum.measurements.setup import Progress, Setup
from gradaccum.measurements.spread import Way, spread, ways
from gradaccum.measurements.timing import WARM_UP, quiet, shuffled_rounds, visit_all

Visited = tuple[Way, BatchPlan]


@dataclass(frozen=True)
class Timed(StepTime):
    """Everything timed of one way at one plan; a step takes as long as on the rank that is slowest in it."""

    way: Way

    def per_window(self, count: str) -> int:
        """What a window counted; the same in every window once DDP has found its buckets."""
        return int(getattr(self.point.steps[-1].result, count))


def time_ways(bench: Bench, config: Config, setup: Setup, *, progress: Progress) -> list[Timed]:
    """Time every way at every plan, for at most `config.seconds` (but each once)."""
    per_micro, world = config.micro_batch, config.world_size
    plans = [BatchPlan(per_micro * steps * world, per_micro, world) for steps in config.accum_steps]
    all_ways = ways(config.strategies)
    points = [(way, plan) for way in all_ways for plan in plans]
    timer = RankTimer(bench, config, setup)
    steps = timer.affordable(points)
    order = [*points, *shuffled_rounds(points, config.repeats - 1, seed=setup.seed)]
    timed = visit_all(progress(order, "distributed"), lambda each: timer.visit(*each, steps[each]), timer.has_time)
    return [Timed(point, way) for (way, _), point in zip(points, timed, strict=True)]


class RankTimer:
    """Times steps; every visit trains the same new model on the same micro-batches, dealt out to the ranks."""

    def __init__(self, bench: Bench, config: Config, setup: Setup) -> None:
        self.bench, self.config = bench, config
        self.settings = setup.optimizers.settings(config.optimizer)
        world, rank = dist.get_world_size(), dist.get_rank()
        most = min(len(bench.workload.train) // (config.micro_batch * world), max(config.accum_steps) * 4)
        pieces = list(consecutive(bench.order(config.micro_batch * world * max(most, 1)), config.micro_batch))
        self.micro_batches = [bench.micro_batch(indices) for indices in pieces[rank::world]]
        self.start = perf_counter()

    def has_time(self) -> bool:
        """Asked by all ranks together, so that they agree."""
        (elapsed,) = slowest([perf_counter() - self.start])
        return elapsed < self.config.seconds

    def affordable(self, points: Sequence[Visited]) -> dict[Visited, int]:
        """Steps of each point's visits, at most `num_steps`, that take each an equal share of the time."""
        share = self.config.seconds / (self.config.repeats * len(points))
        micro, world = self.config.micro_batch, self.config.world_size
        one = {way: self.visit(way, BatchPlan(micro * world, micro, world), 1).wall_ms[0] for way, _ in points}
        return {
            (way, plan): max(1, min(self.config.num_steps, int(1000 * share / (one[way] * plan.accum_steps))))
            for way, plan in points
        }

    def visit(self, way: Way, plan: BatchPlan, num_steps: int) -> Visit:
        """The share of a CPU is not looked at: a rank that waits for another needs none."""
        model = spread(self.bench.model(), way.strategy)
        optimizer = make_optimizer(model, self.settings)
        accumulator = way.accumulator(model, optimizer, self.bench.workload.objective, settings=self.settings)
        prepared = windows(cycle(self.micro_batches), plan.accum_steps, ranks="own")
        for _ in range(WARM_UP):
            accumulator.step(next(prepared)[:2])
        with quiet():
            steps, walls = zip(*[self.timed(accumulator, next(prepared)) for _ in range(num_steps)], strict=True)
        return Visit(plan, tuple(map(TimedStep, steps, slowest(walls))), cpu_share=1.0)

    def timed(self, accumulator: Accumulator, window: Sequence[Batch]) -> tuple[StepResult, float]:
        dist.barrier()  # so that no rank's time holds another's delay
        start = perf_counter()
        result = accumulator.step(window)
        if self.bench.device.type == "cuda":
            torch.cuda.synchronize(self.bench.device)
        return result, 1000 * (perf_counter() - start)


def slowest(values: Sequence[float]) -> list[float]:
    """The largest of each over all ranks, the same on all of them."""
    largest: list[float] = exchange(torch.tensor(values, dtype=torch.float64)).amax(0).tolist()
    return largest

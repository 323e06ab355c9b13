"""The distributed measurement's computation: every way's window against one process, then its steps timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gradaccum.engine.batching import Batch
from gradaccum.measurements.bench import Bench
from gradaccum.measurements.comparison import Scale, Trace, TrainingStep, full_batch_step, scale_of, take_step
from gradaccum.measurements.distributed import Config
from gradaccum.measurements.rank_timing import Timed, time_ways
from gradaccum.measurements.setup import Progress, Setup
from gradaccum.measurements.spread import Way, even_share, mean_of_rank_means, spread, uneven_share, ways
from gradaccum.measurements.verdict import Difference, Verdict, judge

DTYPES = (torch.float64, torch.float32)

Share = Sequence[Sequence[int]]


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
class Sweep:
    """Everything measured; `taken` by way and `accum_steps`, then what was shared out unevenly, and the control."""

    even: dict[tuple[Way, int], Taken]
    uneven: list[Taken]
    control: Taken
    timed: list[Timed]


def sweep(config: Config, setup: Setup, progress: Progress) -> Sweep:
    """See `gradaccum.measurements.distributed.measure`."""
    bench = Bench.prepare(setup)
    comparer = RankComparer(bench, config, setup)
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
        timed=time_ways(bench, config, setup, progress=progress),
    )


@dataclass
class RankComparer:
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

        sharp, single = (self.differ(way, share, step, dtype=dtype) for dtype in DTYPES)
        return Taken(
            name="control/mean_of_rank_means" if mistake else way.name,
            share=share,
            sharp=sharp[0],
            single=single[0],
            verdict=judge(sharp[0], single[0], micro_batches=sum(map(len, share)), tolerance=self.config.tolerance),
            optimizer_steps=farthest_from_one(single[1].optimizer_steps),
        )

    def differ(self, way: Way, share: Share, step: TrainingStep, *, dtype: torch.dtype) -> tuple[Difference, Trace]:
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

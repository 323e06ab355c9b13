"""Timing optimizer steps: in shuffled rounds, within a time budget, and again where the machine disturbed them."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from statistics import median
from time import perf_counter, thread_time
from typing import TypeVar

import torch

from gradaccum.engine.accumulator import Accumulator
from gradaccum.engine.batching import Batch, BatchPlan, windows
from gradaccum.errors import ConfigError
from gradaccum.measurements.bench import Bench, consecutive, make_optimizer
from gradaccum.measurements.points import Point, TimedStep, Visit
from gradaccum.measurements.setup import SGD, AdamW, Progress

Visited = TypeVar("Visited")

WARM_UP = 2
"""Untimed steps before the timed ones of a visit: they pay for first allocations and the optimizer's state."""

SHORT = 2
"""Micro-batches of an untimed step, at most: the second one adds to a gradient that is there, as all later ones do."""


class Timer:
    """Times a plan's steps; every visit trains the same new model on the same micro-batches."""

    def __init__(self, bench: Bench, settings: SGD | AdamW, steps: Mapping[BatchPlan, int]) -> None:
        self.bench, self.settings = bench, settings
        self.prepared = {micro: prepare(bench, micro, steps) for micro in {plan.micro_batch for plan in steps}}

    def visit(self, plan: BatchPlan, num_steps: int) -> Visit:
        model = self.bench.model()
        accumulator = Accumulator(
            model,
            make_optimizer(model, self.settings),
            self.bench.workload.objective,
            clip_norm=self.settings.clip_norm,
        )
        prepared = self.prepared[plan.micro_batch]
        for _ in range(WARM_UP):
            accumulator.step((prepared * SHORT)[: min(SHORT, plan.accum_steps)])
        following = windows(cycle(prepared), plan.accum_steps)
        with quiet():
            wall, cpu = perf_counter(), thread_time()
            steps = tuple(self.timed(accumulator, next(following)) for _ in range(num_steps))
            share = (thread_time() - cpu) / (perf_counter() - wall)
        return Visit(plan, steps, share if self.bench.device.type == "cpu" else 1.0)

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

    def expected_seconds(self, plans: Sequence[BatchPlan], *, at_most: float) -> dict[BatchPlan, float]:
        """A guess at each plan's step, from one window of two micro-batches of each size, the smallest first.

        Sizes are tried until what they ask for exceeds `at_most`; the larger ones then take as long a sample.
        """
        per_micro: dict[int, float] = {}
        asked = 0.0
        for micro in sorted({plan.micro_batch for plan in plans}):
            if asked <= at_most:
                last, per_micro[micro] = micro, self.visit(BatchPlan(SHORT * micro, micro), 1).wall_ms[0] / 1000 / SHORT
            else:
                per_micro[micro] = per_micro[last] * micro / last
            asked += sum(plan.accum_steps * per_micro[micro] for plan in plans if plan.micro_batch == micro)
        return {plan: plan.accum_steps * per_micro[plan.micro_batch] for plan in plans}


def prepare(bench: Bench, micro: int, steps: Mapping[BatchPlan, int]) -> list[Batch]:
    """Micro-batches for the longest visit of that size, at most an epoch of them, which is then gone through again."""
    longest = max(count * plan.accum_steps for plan, count in steps.items() if plan.micro_batch == micro)
    number = min(longest, max(1, len(bench.workload.train) // micro))
    return [bench.micro_batch(indices) for indices in consecutive(bench.order(number * micro), micro)]


def time_points(
    timer: Timer, steps: Mapping[BatchPlan, int], progress: Progress, *, repeats: int, seconds: float, seed: int
) -> list[Point]:
    """Visit every plan `repeats` times, for at most `seconds` (but every plan once), then repeat what was disturbed."""
    end = perf_counter() + seconds
    expected = timer.expected_seconds(list(steps), at_most=seconds)
    left = end - perf_counter()
    steps = within(left, expected, steps, repeats=repeats, spent=seconds - left)
    order = progress(shuffled_rounds(list(steps), repeats, seed=seed), "throughput")
    return visit_all(order, lambda plan: timer.visit(plan, steps[plan]), lambda: perf_counter() < end)


def visit_all(order: Iterable[Visited], visit: Callable[[Visited], Visit], has_time: Callable[[], bool]) -> list[Point]:
    """Go through the order while there is time, but to everything once; then repeat what was disturbed."""
    visits: dict[Visited, list[Visit]] = {}
    for each in order:
        if each not in visits or has_time():
            visits.setdefault(each, []).append(visit(each))
    return [repeat_disturbed(seen, partial(visit, each), has_time) for each, seen in visits.items()]


def within(
    seconds: float,
    expected: Mapping[BatchPlan, float],
    steps: Mapping[BatchPlan, int],
    *,
    repeats: int,
    spent: float = 0.0,
) -> dict[BatchPlan, int]:
    """Fewer steps for every plan, at least 1, where all rounds would take longer than `seconds`, left after `spent`.

    Raises:
        ConfigError: one round of one step each would take longer already.
    """
    warm_up = sum(WARM_UP * min(SHORT, plan.accum_steps) / plan.accum_steps * each for plan, each in expected.items())
    least = warm_up + sum(expected.values())
    if least > seconds:
        raise ConfigError(
            f"throughput: one step at every point takes about {least:.3g} s, warm-up included, but of "
            f"throughput.seconds = {spent + seconds:.3g} preparing took {spent:.3g} s already. Set it to "
            f"{math.ceil(2 * (spent + repeats * least))} for all {repeats} rounds, to {math.ceil(2 * (spent + least))} "
            f"for one, or leave out the points that take longest (micro-batch x N): "
            f"{', '.join(f'{each.micro_batch} x {each.accum_steps}' for each in slowest(expected))}."
        )
    timed = repeats * sum(count * expected[plan] for plan, count in steps.items())
    share = (seconds - repeats * warm_up) / timed
    return {plan: max(1, min(count, int(count * share))) for plan, count in steps.items()}


def slowest(expected: Mapping[BatchPlan, float]) -> list[BatchPlan]:
    return sorted(expected, key=lambda plan: -expected[plan])[:3]


def shuffled_rounds(plans: Sequence[Visited], rounds: int, *, seed: int) -> list[Visited]:
    """Every plan once a round, in an order of each round's own, so that the machine's drift spreads over all."""
    shuffle = random.Random(seed)
    return [plan for _ in range(rounds) for plan in shuffle.sample(plans, len(plans))]


def repeat_disturbed(visits: Sequence[Visit], again: Callable[[], Visit], has_time: Callable[[], bool]) -> Point:
    """Replace disturbed visits by new ones, each once at most; one that stays disturbed is kept, and counted."""
    kept = list(visits)
    disturbed = [visit for visit in visits if visit.disturbed(visits)]
    for visit in disturbed:
        if has_time():
            new = again()
            kept[kept.index(visit)] = min(visit, new, key=lambda each: median(each.wall_ms))
    return Point(kept[0].plan, tuple(kept), len(disturbed))


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection while the clock runs; collecting before would take longer than most visits."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

"""What was timed: steps, the visits they were timed in, and the points visited."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from gradaccum.engine.accumulator import StepResult
from gradaccum.engine.batching import BatchPlan
from gradaccum.results.intervals import Interval, geometric_interval

BUSY = 0.85
"""Share of a visit's wall time that this thread had a CPU; below it, others had it too often."""

SHIFT = 1.2
"""A visit whose median exceeds the best visit's to the same point by this factor met a slower machine."""


@dataclass(frozen=True)
class TimedStep:
    """One optimizer step."""

    result: StepResult
    wall_ms: float

    @property
    def loss(self) -> float | None:
        """None where the window had no target."""
        return float(self.result.loss) if self.result.applied else None


@dataclass(frozen=True)
class Visit:
    """The timed steps of one point in one round, and the share of their time that this thread was on a CPU."""

    plan: BatchPlan
    steps: tuple[TimedStep, ...]
    cpu_share: float

    @property
    def wall_ms(self) -> list[float]:
        return [step.wall_ms for step in self.steps]

    def disturbed(self, siblings: Sequence[Visit]) -> bool:
        """Whether the machine had other things to do, judged beside the other visits to the same point."""
        best = min(median(visit.wall_ms) for visit in siblings)
        return self.cpu_share < BUSY or median(self.wall_ms) > SHIFT * best


@dataclass(frozen=True)
class Point:
    """Everything timed at one point; `disturbed` counts the visits that were found so, replaced or not."""

    plan: BatchPlan
    visits: tuple[Visit, ...]
    disturbed: int

    @property
    def steps(self) -> list[TimedStep]:
        return [step for visit in self.visits for step in visit.steps]

    @property
    def median_step_ms(self) -> float:
        return median(step.wall_ms for step in self.steps)

    @property
    def round_medians_ms(self) -> list[float]:
        """By visit. Steps of one visit share what the machine did just then: only visits tell how sure a time is."""
        return [median(visit.wall_ms) for visit in self.visits]

    @property
    def round_spread(self) -> float:
        """How far the visits' medians lie apart, relative to the point's."""
        return (max(self.round_medians_ms) - min(self.round_medians_ms)) / self.median_step_ms

    @property
    def samples_per_sec(self) -> float:
        """At the median step, which a few disturbed ones do not move."""
        return 1000 * self.plan.effective_batch / self.median_step_ms

    @property
    def sync_calls(self) -> int:
        return sum(step.result.sync_calls for step in self.steps)

    @property
    def avg_loss(self) -> float | None:
        """Over the windows that had a target; None where none had."""
        losses = [loss for step in self.steps if (loss := step.loss) is not None]
        return fmean(losses) if losses else None


def disturbance(points: Iterable[Point]) -> str | None:
    """How much of what was timed the machine disturbed, and what to do where it was most; None where nothing was."""
    counts = [(point.disturbed, len(point.visits)) for point in points]
    disturbed, visits = map(sum, zip(*counts, strict=True))
    if not disturbed:
        return None
    return (
        f"The machine disturbed {disturbed} of {visits} visits (too little of a CPU, or a median that was shifted); "
        "they were timed again while seconds allowed."
        + (" That is most of them: measure again on a quieter machine." if disturbed > visits / 2 else "")
    )


@dataclass(frozen=True)
class StepTime:
    """How long a step takes at one point."""

    point: Point

    @property
    def plan(self) -> BatchPlan:
        return self.point.plan

    @property
    def ms(self) -> float:
        return self.point.median_step_ms

    @property
    def interval(self) -> Interval | None:
        """Over rounds; None where one alone was timed, which does not tell how far rounds lie apart."""
        medians = self.point.round_medians_ms
        return geometric_interval(medians) if len(medians) > 1 else None

"""What a sweep measured: its points, their fit and the machine's limit, each with what is derived from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from gradaccum.engine.batching import BatchPlan
from gradaccum.measurements.points import StepTime
from gradaccum.results.fits import StepTimeFit, extrapolation_error, fit_rounds, fit_step_time
from gradaccum.results.intervals import Interval, mean_interval


@dataclass(frozen=True)
class Limit:
    """What the machine could do at best, and what one micro-batch of each size asks of it."""

    peak_flops_per_sec: float
    flops: dict[int, int]

    def share(self, plan: BatchPlan, step_ms: float) -> float:
        """Counted operations a second, as a share of the matrix-product peak measured here.

        The field's model FLOPs utilization (Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B) is a share of
        the hardware's nominal peak instead, which no product reaches, so that it is smaller.
        """
        return 1000 * plan.accum_steps * self.flops[plan.micro_batch] / (step_ms * self.peak_flops_per_sec)


@dataclass(frozen=True)
class Measured(StepTime):
    """One point with what is reported of it."""

    mfu: float


@dataclass(frozen=True)
class Fitted:
    """The step-time model of the fixed micro-batch: fitted to all rounds together, and to each alone."""

    best: StepTimeFit
    rounds: list[StepTimeFit]
    extrapolation_error: float | None
    micro_batch: int

    @classmethod
    def of(cls, curve: Sequence[Measured]) -> Fitted:
        steps, times = [each.plan.accum_steps for each in curve], [each.ms for each in curve]
        return cls(
            fit_step_time(steps, times),
            fit_rounds(steps, [each.point.round_medians_ms for each in curve]),
            extrapolation_error(steps, times),
            curve[0].plan.micro_batch,
        )

    @property
    def flattens_at(self) -> int:
        return self.micro_batch * self.best.flattens_at_accum_steps()

    @property
    def flattens_interval(self) -> Interval | None:
        return self.interval(lambda each: self.micro_batch * each.flattens_at_accum_steps(), least=self.micro_batch)

    def interval(self, of: Callable[[StepTimeFit], float], *, least: float = 0.0) -> Interval | None:
        """Of something that a fit says and that is `least` or more; None where one round alone was fitted."""
        return mean_interval(list(map(of, self.rounds))).at_least(least) if len(self.rounds) > 1 else None


@dataclass(frozen=True)
class Costs:
    """Both sweeps: `curve` at a fixed micro-batch, `frontier` at a fixed effective batch."""

    curve: Sequence[Measured]
    frontier: Sequence[Measured]
    limit: Limit

    @cached_property
    def fit(self) -> Fitted:
        return Fitted.of(self.curve)

    def t_micro_ms(self, each: Measured) -> float:
        """One micro-batch's time at that point, with what is paid once a step taken off, if noise leaves anything."""
        left = each.ms - self.fit.best.t_step_ms
        return (left if left > 0 else each.ms) / each.plan.accum_steps

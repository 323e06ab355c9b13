"""The step-time model of one strategy over ranks, and how far to believe it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradaccum.measurements.distributed import Strategy
from gradaccum.measurements.rank_sweep import Sweep
from gradaccum.results.intervals import Interval, ends, mean_interval
from gradaccum.results.sync_fit import SyncTimeFit, fit_sync_rounds, fit_sync_time

PARTS = ("t_micro_ms", "t_sync_ms", "t_step_ms")


@dataclass(frozen=True)
class Fitted:
    """The step-time model of one strategy, over both ways to sync: fitted to all rounds together, and to each alone.

    Keeping parameters gathered is left out: its micro-batches cost otherwise.
    """

    best: SyncTimeFit
    rounds: Sequence[SyncTimeFit]

    @classmethod
    def of(cls, sweep: Sweep, strategy: Strategy) -> Fitted:
        timed = [each for each in sweep.timed if each.way.strategy == strategy and not each.way.keep_gathered]
        steps, syncs = [each.plan.accum_steps for each in timed], [each.per_window("sync_calls") for each in timed]
        return cls(
            fit_sync_time(steps, syncs, [each.ms for each in timed]),
            fit_sync_rounds(steps, syncs, [each.point.round_medians_ms for each in timed]),
        )

    def interval(self, name: str) -> Interval | None:
        """Of a part, over rounds; None where one alone was fitted."""
        parts = [float(getattr(fit, name)) for fit in self.rounds]
        return mean_interval(parts).at_least(0.0) if len(parts) > 1 else None

    def part(self, name: str) -> dict[str, float | None]:
        return {name: getattr(self.best, name), **ends(name, self.interval(name))}

    def sentence(self) -> str:
        """The model with its parts' intervals, and whether to believe it."""
        micro, sync, step = (self.shown(name) for name in PARTS)
        found = f"step time = N x {micro} + syncs x {sync} + {step}"
        missed = f"{self.best.max_rel_residual:.0%}"
        if self.best.explains:
            return f"{found}, which misses no point by more than {missed}."
        return f"{found} misses a point by {missed}, so that it explains little: go by the measured times."

    def shown(self, name: str) -> str:
        interval = self.interval(name)
        value = f"{getattr(self.best, name):.2g} ms"
        return f"{value} ({interval.low:.2g} to {interval.high:.2g})" if interval else value

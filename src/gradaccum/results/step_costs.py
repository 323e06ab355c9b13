"""Measured times, to predict those of other plans; no torch."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradaccum.results.outcome import Table


@dataclass(frozen=True)
class StepCosts:
    """What the throughput stage found: the times of `step time = accum_steps * t_micro + t_step`.

    Attributes:
        workload, optimizer: what was measured.
        t_step_ms: paid once a step.
        t_micro_ms: one micro-batch's forward and backward pass, by its samples.
        flattens_at_effective_batch: of the curve at one fixed micro-batch.
        extrapolation_error: by how much the model, fitted on the smaller half of that curve, misses its largest point.
        frontier_ms: one step at each point of the frontier, all together.
    """

    workload: str
    optimizer: str
    t_step_ms: float
    t_micro_ms: Mapping[int, float]
    flattens_at_effective_batch: int
    extrapolation_error: float | None
    frontier_ms: float

    @classmethod
    def of(cls, frontier: Table, metrics: Mapping[str, Any]) -> StepCosts:
        """From `outputs/throughput/frontier.csv` and `metrics.json`."""
        return cls(
            workload=frontier[0]["workload"],
            optimizer=frontier[0]["optimizer"],
            t_step_ms=metrics["t_step_ms"],
            t_micro_ms={int(row["micro_batch"]): float(row["t_micro_ms"]) for row in frontier},
            flattens_at_effective_batch=metrics["flattens_at_effective_batch"],
            extrapolation_error=metrics["extrapolation_error"],
            frontier_ms=sum(float(row["median_step_ms"]) for row in frontier),
        )

    def step_ms(self, micro_batch: int, accum_steps: int) -> float:
        return accum_steps * self.micro_ms(micro_batch) + self.t_step_ms

    def spans(self, micro_batch: int) -> bool:
        """Whether smaller and larger ones were measured, or that very one."""
        return min(self.t_micro_ms) <= micro_batch <= max(self.t_micro_ms)

    def micro_ms(self, micro_batch: int) -> float:
        """Between measured sizes a power law; above them in proportion to the samples; below, the least one's."""
        sizes = sorted(self.t_micro_ms)
        if micro_batch >= sizes[-1]:
            return self.t_micro_ms[sizes[-1]] * micro_batch / sizes[-1]
        if micro_batch <= sizes[0]:
            return self.t_micro_ms[sizes[0]]
        above = bisect_left(sizes, micro_batch)
        return _power_law(micro_batch, sizes[above - 1 : above + 1], self.t_micro_ms)


def _power_law(x: int, between: Sequence[int], times: Mapping[int, float]) -> float:
    low, high = between
    share = math.log(x / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(times[low]) + share * math.log(times[high]))

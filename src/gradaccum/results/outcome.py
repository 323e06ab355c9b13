"""What a measurement hands over: everything a stage writes, prints and logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradaccum.results.curve import Curve

Row = Mapping[str, Any]
Metrics = Mapping[str, Any]
"""A stage's headline numbers, as read from its `metrics.json`."""

Table = Sequence[Row]


@dataclass(frozen=True)
class StepSeries:
    """One metric over steps, for the tracker: `values[i]` was measured at `steps[i]`; null where it was not finite."""

    name: str
    steps: Sequence[int]
    values: Sequence[float | None]


@dataclass(frozen=True)
class Outcome:
    """One measurement's results.

    Attributes:
        metrics: headline numbers, flat; null where there is none.
        curve: the accum-curve.
        summary: rows of the table that a person reads in the terminal.
        findings: sentences that say what was found.
        failures: sentences that say which claim does not hold; empty when all do.
        tables: further tables by file name without ending, written as CSV.
        series: metrics over steps beside those of the curve.
    """

    metrics: Mapping[str, float | int | bool | None]
    curve: Curve
    summary: Table
    findings: Sequence[str] = ()
    failures: Sequence[str] = ()
    tables: Mapping[str, Table] = field(default_factory=dict)
    series: Sequence[StepSeries] = ()

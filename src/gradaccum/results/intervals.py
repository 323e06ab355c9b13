"""Means over repeated runs and rounds, with their confidence intervals; no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.stats import t

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean, and where the true one lies with 95 % confidence."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, metrics: Mapping[str, Any], name: str) -> Interval | None:
        """From the fields that `fields` made; None where they are null."""
        mean, low, high = (metrics[f"{name}{ending}"] for ending in ("", "_low", "_high"))
        return None if mean is None else cls(mean, low, high)

    def shown(self, form: str) -> str:
        """As cells of tables have it, each number in that format."""
        return f"{self.mean:{form}} ({self.low:{form}} to {self.high:{form}})"

    def at_least(self, bound: float) -> Interval:
        """Without what cannot be, such as times below 0."""
        return replace(self, low=max(bound, self.low), high=max(bound, self.high))

    def fields(self, name: str) -> dict[str, Any]:
        """As fields of a point: `name`, `name_low`, `name_high`."""
        return {name: self.mean, **ends(name, self)}


def shown(row: Mapping[str, Any], name: str, form: str) -> str:
    """The cell of a row's interval; a dash where it is null."""
    interval = Interval.of(row, name)
    return interval.shown(form) if interval else "-"


def ends(name: str, interval: Interval | None) -> dict[str, float | None]:
    """Of what is estimated otherwise than by the mean: `name_low`, `name_high`; null where there is no interval."""
    low, high = (interval.low, interval.high) if interval else (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


def mean_interval(values: Sequence[float]) -> Interval:
    """Student's t interval; at least two values, taken as independent and about normal."""
    assert len(values) >= 2, "one value has no spread"
    mean = float(np.mean(values))
    reach = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
    return Interval(mean, mean - reach, mean + reach)


def geometric_interval(values: Sequence[float]) -> Interval:
    """The same of values above 0 whose noise grows with them, such as times and their ratios: by their logarithms."""
    logs = mean_interval([math.log(value) for value in values])
    return Interval(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high))


def first_reached(x: Sequence[float], y: Sequence[float | None], level: float) -> float | None:
    """Where y first comes down to `level`, on straight lines between the points; None where it never does."""
    known = [(at, value) for at, value in zip(x, y, strict=True) if value is not None]
    for index, (at, value) in enumerate(known):
        if value <= level:
            if index == 0:
                return at
            before, above = known[index - 1]
            return before + (at - before) * (above - level) / (above - value)
    return None

"""CPU time of loops, interleaved, as ratios: what neighbours on the machine do hits all loops alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Timing:
    """CPU microseconds a window, one number a round."""

    rounds_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        return median(self.rounds_us)

    @property
    def least_us(self) -> float:
        """The round that other programs disturbed least."""
        return min(self.rounds_us)

    def over(self, other: Timing) -> Ratio:
        """Round by round, so that a slow round slows both sides."""
        ratios = sorted(mine / theirs for mine, theirs in zip(self.rounds_us, other.rounds_us, strict=True))
        quarter = len(ratios) // 4
        return Ratio(median(ratios), ratios[quarter], ratios[-1 - quarter])


@dataclass(frozen=True)
class Ratio:
    """Median of the rounds' ratios, and their quartiles."""

    median: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """With each number in the format given, as `.3f`."""
        return f"{self.median:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def interleave(runs: Mapping[str, Callable[[], float | None]], *, windows: int, rounds: int) -> dict[str, Timing]:
    """Time every run (of so many windows) in turn, after two rounds of warm-up.

    The order turns round each time (A B, B A), so that nobody always runs after the same other one.
    """
    rounds_us: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(-2, rounds):
        for name, run in list(runs.items())[:: -1 if number % 2 else 1]:
            started = time.process_time()
            own = run()
            seconds = time.process_time() - started if own is None else own
            if number >= 0:
                rounds_us[name].append(seconds / windows * 1e6)
    return {name: Timing(tuple(times)) for name, times in rounds_us.items()}

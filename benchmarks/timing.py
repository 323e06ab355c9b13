"""CPU time of loops, interleaved, as ratios: what neighbours on the machine do hits all loops alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """CPU microseconds a window, one number a round."""

    rounds_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        return statistics.median(self.rounds_us)

    def over(self, other: Timing) -> Ratio:
        """Round by round, so that a slow round slows both sides."""
        ratios = sorted(mine / theirs for mine, theirs in zip(self.rounds_us, other.rounds_us, strict=True))
        quarter = len(ratios) // 4
        return Ratio(statistics.median(ratios), ratios[quarter], ratios[-1 - quarter])


@dataclass(frozen=True)
class Ratio:
    """Median of the rounds' ratios, and their quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def interleave(runs: Mapping[str, Callable[[], float | None]], *, windows: int, rounds: int) -> dict[str, Timing]:
    """Time every run (of so many windows) in turn, A B A B, after two rounds of warm-up."""
    rounds_us: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(-2, rounds):
        for name, run in runs.items():
            started = time.process_time()
            own = run()
            seconds = time.process_time() - started if own is None else own
            if number >= 0:
                rounds_us[name].append(seconds / windows * 1e6)
    return {name: Timing(tuple(times)) for name, times in rounds_us.items()}

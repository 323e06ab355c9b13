"""Which plan to choose: the fastest that fits, but no larger a micro-batch than pays. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradaccum.errors import ConfigError
from gradaccum.results.sizes import HEADROOM, shown_bytes

PAYS = 0.03
"""A micro-batch that gains less than this share of samples/s is not worth its memory."""


@dataclass(frozen=True)
class Candidate:
    """One way to reach the target, with what is predicted of it; `step_ms` is None where no times were measured."""

    effective_batch: int
    micro_batch: int
    world_size: int
    predicted_bytes: int
    step_ms: float | None

    @property
    def accum_steps(self) -> int:
        return self.effective_batch // (self.micro_batch * self.world_size)

    @property
    def samples_per_sec(self) -> float | None:
        return None if self.step_ms is None else 1000 * self.effective_batch / self.step_ms

    @property
    def speed(self) -> float:
        """What candidates are compared by; without times a larger micro-batch counts as faster, and never as enough."""
        return self.micro_batch if self.samples_per_sec is None else self.samples_per_sec

    def fits(self, memory_bytes: int) -> bool:
        return self.predicted_bytes <= (1 - HEADROOM) * memory_bytes


@dataclass(frozen=True)
class Ranking:
    """Candidates, the chosen one first, then what fits by speed, then what does not by memory."""

    ranked: Sequence[Candidate]
    memory_bytes: int

    @classmethod
    def of(cls, candidates: Sequence[Candidate], memory_bytes: int) -> Ranking:
        """Choose and sort.

        Raises:
            ConfigError: not even the smallest micro-batch fits.
        """
        fitting = [each for each in candidates if each.fits(memory_bytes)]
        if not fitting:
            raise _does_not_fit(min(candidates, key=lambda each: each.predicted_bytes), memory_bytes)
        best = max(each.speed for each in fitting)
        chosen = min((each for each in fitting if each.speed >= (1 - PAYS) * best), key=lambda each: each.micro_batch)
        others = sorted((each for each in fitting if each is not chosen), key=lambda each: -each.speed)
        larger = sorted((each for each in candidates if each not in fitting), key=lambda each: each.predicted_bytes)
        return cls([chosen, *others, *larger], memory_bytes)

    @property
    def chosen(self) -> Candidate:
        return self.ranked[0]

    def reason(self, each: Candidate) -> str:
        """Why a candidate stands where it stands."""
        chosen = self.chosen
        if not each.fits(self.memory_bytes):
            return f"does not fit {shown_bytes(self.memory_bytes)} less {HEADROOM:.0%} headroom"
        if each.step_ms is None:
            return "the largest that fits" if each is chosen else "fits; smaller than it need be"
        if each is chosen:
            return f"within {PAYS:.0%} of the fastest, the smallest such micro-batch"
        gain = each.speed / chosen.speed
        if each.micro_batch > chosen.micro_batch:
            memory = each.predicted_bytes / chosen.predicted_bytes
            return f"fits, but {gain - 1:+.1%} samples/s for {memory:.2g} times the memory"
        return f"fits, but takes {1 / gain:.2g} times as long"


def _does_not_fit(least: Candidate, memory_bytes: int) -> ConfigError:
    needed = int(least.predicted_bytes / (1 - HEADROOM)) + 1
    return ConfigError(
        f"no plan fits: the one that takes least, micro_batch={least.micro_batch}, needs "
        f"{shown_bytes(least.predicted_bytes)}, and "
        f"{shown_bytes(memory_bytes)} less {HEADROOM:.0%} headroom leave {shown_bytes((1 - HEADROOM) * memory_bytes)}. "
        f"More ranks or accumulation steps change nothing in that. Nearest that works: {needed} bytes "
        f"({shown_bytes(needed)}) with micro_batch={least.micro_batch}, accum_steps={least.accum_steps}, "
        f"world_size={least.world_size}; or a smaller model, or an optimizer with less state."
    )

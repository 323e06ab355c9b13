"""Which plan to choose: the fastest that fits, but no larger a micro-batch than pays. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradaccum.errors import ConfigError
from gradaccum.results.sizes import HEADROOM, ratio, shown_bytes

PAYS = 0.03
"""A micro-batch that gains less than this share of samples/s is not worth its memory."""


@dataclass(frozen=True)
class Candidate:
    """One way to reach the target, with what is predicted of it.

    Attributes:
        input_bytes: of the predicted ones, the samples of the step themselves.
        step_ms: None where no times were measured.
    """

    effective_batch: int
    micro_batch: int
    world_size: int
    predicted_bytes: int
    input_bytes: int
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
        if not each.fits(self.memory_bytes):
            return "does not fit"
        if each is self.chosen:
            return f"proposed: {self._why_chosen()}"
        if each.step_ms is None:
            return "fits, smaller than need be"
        gain = each.speed / self.chosen.speed
        if each.micro_batch < self.chosen.micro_batch:
            return f"takes {ratio(1 / gain)}x as long"
        memory = each.predicted_bytes / self.chosen.predicted_bytes
        faster = "no faster" if abs(gain - 1) < 5e-4 else f"{gain - 1:+.1%} speed"
        return faster if memory < 1.05 else f"{faster}, {ratio(memory)}x memory"

    def _why_chosen(self) -> str:
        if self.chosen.step_ms is None:
            return "the largest that fits"
        best = max(each.speed for each in self.ranked if each.fits(self.memory_bytes))
        lost = 1 - self.chosen.speed / best
        return f"{lost:.1%} off fastest" if lost else "the fastest"


def _does_not_fit(least: Candidate, memory_bytes: int) -> ConfigError:
    needed = int(least.predicted_bytes / (1 - HEADROOM)) + 1
    cut = f"micro_batch={least.micro_batch}, accum_steps={least.accum_steps}, world_size={least.world_size}"
    remedy = (
        "Most of it are the step's own samples, so a smaller target or more ranks help."
        if 2 * least.input_bytes > least.predicted_bytes
        else "More ranks or steps change nothing in that; a smaller model, or an optimizer with less state, does."
    )
    return ConfigError(
        f"no plan fits: the one that takes least, {cut}, needs {shown_bytes(least.predicted_bytes)}, and "
        f"{shown_bytes(memory_bytes)} less {HEADROOM:.0%} headroom leave "
        f"{shown_bytes((1 - HEADROOM) * memory_bytes)}. {remedy} Nearest that works: {needed} bytes "
        f"({shown_bytes(needed)}) with {cut}."
    )

"""What should I set? Micro-batch, accumulation steps and ranks for a target effective batch and a memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from gradaccum.errors import ConfigError
from gradaccum.measurements.setup import STRICT, Progress, Setup, divisors, no_progress
from gradaccum.results.sizes import MemoryBytes

if TYPE_CHECKING:
    from gradaccum.results.outcome import Outcome
    from gradaccum.results.step_costs import StepCosts

MOST_SAMPLES = 2**30
"""Of one optimizer step: tensors of more could not be described."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """The `plan` section.

    Attributes:
        target_effective_batch: samples of an optimizer step, over all ranks.
        memory_bytes: what each rank has.
        memory_device: where that memory is; it need not be here.
        world_size: data-parallel ranks.
    """

    target_effective_batch: Annotated[int, Field(strict=True, ge=1, le=MOST_SAMPLES)]
    memory_bytes: MemoryBytes
    memory_device: Literal["cpu", "cuda"]
    world_size: Annotated[int, Field(strict=True, ge=1, le=MOST_SAMPLES)]

    def __post_init__(self) -> None:
        target, ranks = self.target_effective_batch, self.world_size
        if target < ranks:
            raise ConfigError(
                f"target_effective_batch={target} is smaller than world_size={ranks}, so some ranks would have no "
                f"sample. Nearest that work: {target} on {target} rank{'s' * (target > 1)}, or {ranks} on {ranks}."
            )
        if target % ranks:
            below = target - target % ranks
            fewer = max(each for each in divisors(target) if each <= ranks)
            raise ConfigError(
                f"target_effective_batch={target} is not a multiple of world_size={ranks}, so the ranks would step on "
                f"unequal batches. Nearest that work: {below} or {below + ranks} on {ranks} ranks, or {target} on "
                f"{fewer}."
            )

    def micro_batches(self) -> list[int]:
        """Sizes that cut a rank's share equally: of its divisors the largest of each doubling."""
        by_doubling = {size.bit_length(): size for size in divisors(self.target_effective_batch // self.world_size)}
        return sorted(by_doubling.values())

    def better_cut(self) -> str | None:
        """What to say where a rank's share has few divisors, a prime above all, and a number nearby has many."""
        share = self.target_effective_batch // self.world_size
        if 2 * len(self.micro_batches()) > share.bit_length():
            return None
        round_number = 2 ** max(0, share.bit_length() - 3)
        nearby = self.world_size * round_number * round(share / round_number)
        return (
            f"{share} samples a rank are cut equally by micro-batches of {_listed(divisors(share))} alone; a target of "
            f"{nearby} leaves more choice."
        )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(each) for each in numbers[:-1]) + f" or {numbers[-1]}"


def measure(
    config: Config, setup: Setup, progress: Progress = no_progress, *, costs: StepCosts | None = None
) -> Outcome:
    """Predict every candidate's memory, and its time where `costs` were measured; rank them, with reasons."""
    from gradaccum.measurements.candidates import rank_candidates  # noqa: PLC0415 (needs torch, a config does not)

    return rank_candidates(config, setup, progress, costs=costs)

"""What does it cost? Step time and samples per second, at a fixed micro-batch and at a fixed effective batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from gradaccum.errors import ConfigError
from gradaccum.measurements.setup import (
    STRICT,
    OptimizerName,
    PositiveFloat,
    Progress,
    Setup,
    divisors,
    no_progress,
    require_distinct,
)

if TYPE_CHECKING:
    from gradaccum.results.outcome import Outcome

MicroBatch = Annotated[int, Field(strict=True, ge=1, le=2**16)]
"""Its samples are made before the clock starts, one by one."""

AccumSteps = Annotated[int, Field(strict=True, ge=1, le=2**20)]
NumSteps = Annotated[int, Field(strict=True, ge=1, le=10_000)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Frontier:
    """The sweep at a fixed effective batch.

    Attributes:
        effective_batch: samples of every step.
        micro_batch: the points; each cuts the effective batch into equal micro-batches.
        num_steps: optimizer steps a point, in each round.
    """

    effective_batch: Annotated[int, Field(strict=True, ge=1, le=2**24)]
    micro_batch: Annotated[tuple[MicroBatch, ...], Field(min_length=1)]
    num_steps: NumSteps

    def __post_init__(self) -> None:
        require_distinct("micro_batch", self.micro_batch)
        for micro in self.micro_batch:
            if self.effective_batch % micro:
                raise ConfigError(
                    f"micro_batch holds {micro}, which does not divide effective_batch={self.effective_batch}, so the "
                    f"last micro-batch would be smaller. Choose from {divisors(self.effective_batch)}."
                )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """The `throughput` section.

    Attributes:
        micro_batch: samples of a forward pass, in the sweep of a fixed micro-batch.
        accum_steps: its points.
        num_steps: optimizer steps a point, in each round.
        frontier: the sweep at a fixed effective batch.
        repeats: rounds; each visits every point of both sweeps, in an order of its own.
        seconds: how long timing may take. Where `repeats` rounds would take longer, every point takes fewer steps; what
            is left is spent on visits that the machine disturbed.
        optimizer: which one steps.
    """

    micro_batch: MicroBatch
    accum_steps: Annotated[tuple[AccumSteps, ...], Field(min_length=2)]
    num_steps: NumSteps
    frontier: Frontier
    repeats: Annotated[int, Field(strict=True, ge=1, le=100)]
    seconds: PositiveFloat
    optimizer: OptimizerName

    def __post_init__(self) -> None:
        require_distinct("accum_steps", self.accum_steps)


def measure(config: Config, setup: Setup, progress: Progress = no_progress) -> Outcome:
    """Time whole optimizer steps, on batches prepared before the clock starts, and fit the step time."""
    from gradaccum.measurements.sweep import sweep  # noqa: PLC0415 (needs torch, which a config does not)

    return sweep(config, setup, progress)

"""What does it cost? Samples per second and step time against the effective batch, at a fixed micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from gradaccum.errors import ConfigError
from gradaccum.measurements.setup import (
    STRICT,
    OptimizerName,
    PositiveInt,
    Progress,
    Setup,
    no_progress,
    require_distinct,
)

if TYPE_CHECKING:
    from gradaccum.results.outcome import Outcome


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """The `throughput` section.

    Attributes:
        micro_batch: samples of a forward pass.
        accum_steps: the points of the curve.
        num_steps: optimizer steps a point, in each round.
        repeats: rounds; each visits every point, in an order of its own.
        optimizer: which one steps.
    """

    micro_batch: PositiveInt
    accum_steps: Annotated[tuple[PositiveInt, ...], Field(min_length=2)]
    num_steps: PositiveInt
    repeats: PositiveInt
    optimizer: OptimizerName

    def __post_init__(self) -> None:
        require_distinct("accum_steps", self.accum_steps)
        if len(self.accum_steps) < 2:
            raise ConfigError("accum_steps holds one number, and a curve needs two. Add another.")


def measure(config: Config, setup: Setup, progress: Progress = no_progress) -> Outcome:
    """Time whole optimizer steps, on batches prepared before the clock starts, and fit the step time."""
    from gradaccum.measurements.sweep import sweep  # noqa: PLC0415 (needs torch, which a config does not)

    return sweep(config, setup, progress)

"""Do published rules for other effective batches hold here? Each tried at this size, beside the arm it departs from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from gradaccum.measurements.grid import Seeds, require_whole_windows
from gradaccum.measurements.rules import Decay
from gradaccum.measurements.setup import (
    STRICT,
    Fraction,
    PositiveFloat,
    PositiveInt,
    Progress,
    Setup,
    no_progress,
    require_distinct,
)

if TYPE_CHECKING:
    from gradaccum.results.outcome import Outcome


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Grid:
    """Arms on equal samples.

    Attributes:
        micro_batch: samples of a forward pass.
        accum_steps: the arms; each trains at `micro_batch * accum_steps`.
        samples: of each arm.
        base_lr: learning rate of the arm that the rule departs from.
    """

    micro_batch: PositiveInt
    accum_steps: Annotated[tuple[PositiveInt, ...], Field(min_length=2)]
    samples: PositiveInt
    base_lr: PositiveFloat

    def __post_init__(self) -> None:
        require_distinct("accum_steps", self.accum_steps)
        require_whole_windows(self.samples, [self.micro_batch * steps for steps in self.accum_steps])


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LinearScaling(Grid):
    """Linear scaling of SGD's learning rate from the smallest arm up (Goyal et al. 2017, arXiv 1706.02677).

    Attributes:
        warmup_fraction: share of the samples over which the base's learning rate rises to the arm's.
    """

    warmup_fraction: Annotated[Fraction, Field(gt=0)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HalfLife(Grid):
    """AdamW's second moment from the largest arm down (Marek et al. 2025, arXiv 2507.07101).

    Attributes:
        base_beta2: second beta of the largest arm.
    """

    base_beta2: Annotated[Fraction, Field(gt=0)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """The `scaling` section: seeds and decay of the learning rate in every arm, and the settings of each comparison."""

    seeds: Seeds
    decay: Decay
    linear: LinearScaling
    half_life: HalfLife

    def __post_init__(self) -> None:
        require_distinct("seeds", self.seeds)


def measure(config: Config, setup: Setup, progress: Progress = no_progress) -> Outcome:
    """Train with each rule and without it, and judge the difference by its interval over seeds."""
    from gradaccum.measurements.published import repeat_published  # noqa: PLC0415 (needs torch, which a config does not)

    return repeat_published(config, setup, progress)

"""What does a larger effective batch buy? Arms trained on the same samples, and the gradient noise scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from gradaccum.errors import ConfigError
from gradaccum.measurements.grid import Seeds, require_whole_windows
from gradaccum.measurements.rules import Beta2Rule, Decay, Scaling
from gradaccum.measurements.setup import (
    STRICT,
    Fraction,
    OptimizerName,
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
class Config:
    """The `efficiency` section.

    Attributes:
        micro_batch: samples of a forward pass.
        accum_steps: the arms; each trains at `micro_batch * accum_steps`.
        samples: how many each arm trains on, the same ones in the same order.
        seeds: of parameters and order; each arm runs once with each.
        optimizer: which one steps; its other settings are those of `optimizers`.
        base_lr: learning rate at the base effective batch.
        base_effective_batch: where the learning rate is `base_lr`, and AdamW's second beta as set.
        scaling: how the learning rate follows the effective batch.
        warmup_fraction: share of the samples over which a learning rate above `base_lr` is reached from there.
        decay: whether the learning rate stays, or falls in a straight line to 0 at the last sample.
        beta2_rule: whether AdamW's second moment keeps its decay per step or its half-life in samples.
    """

    micro_batch: PositiveInt
    accum_steps: Annotated[tuple[PositiveInt, ...], Field(min_length=2)]
    samples: PositiveInt
    seeds: Seeds
    optimizer: OptimizerName
    base_lr: PositiveFloat
    base_effective_batch: PositiveInt
    scaling: Scaling
    warmup_fraction: Fraction
    decay: Decay
    beta2_rule: Beta2Rule

    def __post_init__(self) -> None:
        require_distinct("accum_steps", self.accum_steps)
        require_distinct("seeds", self.seeds)
        require_whole_windows(self.samples, [self.micro_batch * steps for steps in self.accum_steps])
        if max(self.accum_steps) == 1:
            raise ConfigError("accum_steps holds 1 only, which shows no noise scale. Add a number above 1.")
        if self.scaling == "none" and self.warmup_fraction:
            raise ConfigError(
                f"warmup_fraction={self.warmup_fraction} with scaling='none': every arm trains at base_lr, so there is "
                "nothing to warm up to. Set warmup_fraction to 0, or scaling to linear or sqrt."
            )
        if self.beta2_rule == "half_life" and self.optimizer != "adamw":
            raise ConfigError(
                f"beta2_rule='half_life' with optimizer={self.optimizer!r}, which has no second moment. "
                "Set beta2_rule to fixed, or optimizer to adamw."
            )


def measure(config: Config, setup: Setup, progress: Progress = no_progress) -> Outcome:
    """Train every arm with every seed, the noise scale observed along the way, and say where larger costs quality."""
    from gradaccum.measurements.efficiency_results import outcome_of  # noqa: PLC0415 (needs torch, a config does not)
    from gradaccum.measurements.equal_samples import compare_arms  # noqa: PLC0415 (likewise)

    return outcome_of(compare_arms(config, setup, progress))

"""What does each usual mistake do? Every variant against the engine, at step 1 and along a training run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from gradaccum.errors import ConfigError
from gradaccum.measurements.setup import (
    STRICT,
    OptimizerName,
    PositiveFloat,
    PositiveInt,
    Progress,
    Setup,
    no_progress,
    require_distinct,
    require_divisors,
)

if TYPE_CHECKING:
    from gradaccum.results.outcome import Outcome

VariantName = Literal[
    "scaled",
    "naive",
    "mean_of_means",
    "step_every_micro",
    "scaled_clipped",
    "naive_clipped",
    "clip_every_micro",
]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """The `ablation` section.

    Attributes:
        effective_batch: samples of a window.
        accum_steps: micro-batches a window, one training run each.
        variants: which ways to accumulate.
        clip_norm: of the variants that clip; the others never do.
        optimizers: which ones step.
        num_steps: windows of a training run.
    """

    effective_batch: PositiveInt
    accum_steps: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    variants: Annotated[tuple[VariantName, ...], Field(min_length=1)]
    clip_norm: PositiveFloat
    optimizers: Annotated[tuple[OptimizerName, ...], Field(min_length=1)]
    num_steps: PositiveInt

    def __post_init__(self) -> None:
        require_divisors(self.effective_batch, self.accum_steps)
        for name in ("accum_steps", "variants", "optimizers"):
            require_distinct(name, getattr(self, name))
        if "scaled" not in self.variants:
            raise ConfigError("variants lacks 'scaled', which all others are compared with. Add it.")
        if "mean_of_means" in self.variants and max(self.accum_steps) > self.effective_batch // 2:
            raise ConfigError(
                f"accum_steps holds {max(self.accum_steps)} for effective_batch={self.effective_batch}: micro-batches "
                "of one sample all count the same, and mean_of_means shows nothing. Lower it, or drop the variant."
            )


def measure(config: Config, setup: Setup, progress: Progress = no_progress) -> Outcome:
    """Take every variant's first step in float64 beside the full batch's, then train with it in float32."""
    from gradaccum.measurements.ablation_results import outcome_of  # noqa: PLC0415 (needs torch; a config does not)
    from gradaccum.measurements.bench import Bench  # noqa: PLC0415
    from gradaccum.measurements.mistakes import VariantTrainer, arms  # noqa: PLC0415

    trainer = VariantTrainer(Bench.prepare(setup), config, setup)
    return outcome_of([trainer.show(arm) for arm in progress(arms(config), "ablation")], trainer)

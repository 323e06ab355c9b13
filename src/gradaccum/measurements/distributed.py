"""Many ranks: is it right, what is reduced, and what does it cost? Gradients synced once a window, or every time."""

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
)

if TYPE_CHECKING:
    from gradaccum.results.outcome import Outcome

Strategy = Literal["ddp", "fsdp2"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """The `distributed` section.

    Attributes:
        world_size: ranks, which torchrun starts.
        strategies: how the model is spread over them: DistributedDataParallel, fully_shard.
        micro_batch: samples of a forward pass on one rank.
        accum_steps: micro-batches a window, one point each.
        num_steps: timed optimizer steps of a point in each round, at most; a point of longer steps takes fewer.
        repeats: rounds; each visits every point, in an order of its own.
        seconds: how long timing may take; every point is visited once all the same.
        optimizer: which one steps.
        tolerance: largest absolute difference to one process allowed in float32, of gradients and of parameters.
        timeout_s: seconds after which a rank gives the others up.
    """

    world_size: Annotated[PositiveInt, Field(ge=2)]
    strategies: Annotated[tuple[Strategy, ...], Field(min_length=1)]
    micro_batch: PositiveInt
    accum_steps: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    num_steps: PositiveInt
    repeats: PositiveInt
    seconds: PositiveFloat
    optimizer: OptimizerName
    tolerance: PositiveFloat
    timeout_s: PositiveInt

    def __post_init__(self) -> None:
        for name in ("strategies", "accum_steps"):
            require_distinct(name, getattr(self, name))
        if self.micro_batch * max(self.accum_steps) == 1:
            raise ConfigError(
                "micro_batch=1 with accum_steps=[1] gives every rank one sample, so ranks cannot hold unequal parts, "
                "and the measurement could not tell right from wrong. Raise either."
            )


def measure(config: Config, setup: Setup, progress: Progress = no_progress) -> Outcome:
    """Compare every way to spread a window over ranks with one process, count its collectives, time its steps.

    All ranks call this together, started by torchrun; the outcome is that of rank 0, with the failures of all.
    """
    from gradaccum.measurements.launch import launched  # noqa: PLC0415 (needs torch, which a config does not)
    from gradaccum.measurements.rank_results import outcome_of  # noqa: PLC0415
    from gradaccum.measurements.rank_sweep import sweep  # noqa: PLC0415

    with launched(config.world_size, setup, timeout_s=config.timeout_s) as here:
        return outcome_of(sweep(config, here, progress), config)

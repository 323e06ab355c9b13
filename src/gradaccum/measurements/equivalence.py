"""Is it right? One optimizer step over every cut of a batch, against the same step over the whole batch."""

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

Cut = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """The `equivalence` section.

    Attributes:
        effective_batch: samples of the step.
        accum_steps: equal cuts, each by its number of micro-batches.
        cuts: uneven cuts, each by the sizes of its micro-batches.
        optimizers: which ones step.
        tolerance: largest absolute difference allowed in float32, of gradients and of parameters.
        precision: `bf16` also shows what a bf16 model loses over 512 micro-batches, and what a float32 buffer keeps.
    """

    effective_batch: Annotated[PositiveInt, Field(ge=3)]
    accum_steps: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    cuts: tuple[Cut, ...]
    optimizers: Annotated[tuple[OptimizerName, ...], Field(min_length=1)]
    tolerance: PositiveFloat
    precision: Literal["float32", "bf16"]

    def __post_init__(self) -> None:
        require_divisors(self.effective_batch, self.accum_steps)
        for name in ("accum_steps", "cuts", "optimizers"):
            require_distinct(name, getattr(self, name))
        for cut in self.cuts:
            if sum(cut) != self.effective_batch:
                raise ConfigError(
                    f"cuts holds {list(cut)}, which adds up to {sum(cut)}, not to effective_batch="
                    f"{self.effective_batch}, so it cuts another batch. Correct its sizes."
                )
        if max(self.accum_steps) == 1:
            raise ConfigError(
                "accum_steps holds 1 only, so nothing is accumulated and there is nothing to compare. "
                "Add a number above 1 that divides effective_batch."
            )

    def all_cuts(self) -> list[tuple[int, ...]]:
        """Equal cuts, then uneven ones."""
        equal = [(self.effective_batch // steps,) * steps for steps in self.accum_steps]
        return equal + [cut for cut in self.cuts if cut not in equal]

    def uneven_cut(self) -> tuple[int, ...]:
        """One with unequal micro-batches, if need be our own."""
        return next((cut for cut in self.cuts if len(set(cut)) > 1), (self.effective_batch - 1, 1))


def measure(config: Config, setup: Setup, progress: Progress = no_progress) -> Outcome:
    """Compare every cut with the full batch, and with each other, for every optimizer, in float64 and float32.

    Two mistakes are compared in the same way, as negative controls: if one passes, the comparison is blind and the
    measurement fails.
    """
    from gradaccum.measurements.cuts import compare_cuts  # noqa: PLC0415 (needs torch, which a config does not)
    from gradaccum.measurements.equivalence_results import outcome_of  # noqa: PLC0415

    return outcome_of(compare_cuts(config, setup, progress), config)

"""What does a window need in memory? Predicted without running it, then checked against running it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from gradaccum.measurements.setup import (
    STRICT,
    OptimizerName,
    Progress,
    Setup,
    no_progress,
    require_distinct,
)
from gradaccum.results.sizes import MemoryBytes

if TYPE_CHECKING:
    from gradaccum.results.outcome import Outcome

MicroBatch = Annotated[int, Field(strict=True, ge=1, le=2**24)]
AccumSteps = Annotated[int, Field(strict=True, ge=1, le=1024)]
"""Every micro-batch of a window is gone through twice."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """The `memory` section.

    Attributes:
        micro_batch: sizes of the micro-batches, each with every number of `accum_steps`.
        accum_steps: micro-batches a window.
        optimizer: which one steps.
        precision: of forward and loss; the parameters stay float32.
        budget_bytes: memory in which the largest micro-batch is sought.
        budget_device: where that memory is; it need not be here.
    """

    micro_batch: Annotated[tuple[MicroBatch, ...], Field(min_length=1)]
    accum_steps: Annotated[tuple[AccumSteps, ...], Field(min_length=1)]
    optimizer: OptimizerName
    precision: Literal["float32", "bf16", "fp16"]
    budget_bytes: MemoryBytes
    budget_device: Literal["cpu", "cuda"]

    def __post_init__(self) -> None:
        for name in ("micro_batch", "accum_steps"):
            require_distinct(name, getattr(self, name))


def measure(config: Config, setup: Setup, progress: Progress = no_progress) -> Outcome:
    """Predict every window's peak, run it in a process of its own, and compare."""
    from gradaccum.measurements.windows_checked import check_windows  # noqa: PLC0415 (needs torch, a config does not)

    return check_windows(config, setup, progress)

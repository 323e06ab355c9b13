"""What sections that train on equal samples share. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from gradaccum.errors import ConfigError
from gradaccum.measurements.setup import Seed

Seeds = Annotated[tuple[Seed, ...], Field(min_length=3)]
"""Fewer would give no interval to speak of."""


def require_whole_windows(samples: int, effective_batches: Sequence[int]) -> None:
    """Refuse a number of samples that some arm could not divide into whole windows."""
    for effective in effective_batches:
        if samples % effective:
            raise ConfigError(
                f"samples={samples} is not a multiple of the effective batch {effective}, so that arm would train on "
                "fewer samples. Set it to a multiple of every effective batch, such as "
                f"{_near(samples, effective_batches)}."
            )


def _near(samples: int, effective_batches: Sequence[int]) -> int:
    common = math.lcm(*effective_batches)
    return max(1, round(samples / common)) * common

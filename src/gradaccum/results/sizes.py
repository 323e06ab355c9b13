"""Amounts as people read and write them, and how many bytes of a budget to leave free."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from gradaccum.errors import ConfigError

HEADROOM = 0.1
"""Share of a memory budget that stays free: for the allocator, and for what kernels take for themselves."""

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

LEAST, MOST = 2**16, 2**50
"""Bytes of memory that something could be trained in."""

BARE = 2**20
"""A number below this, without a unit, was hardly meant in bytes."""


def shown_bytes(size: float) -> str:
    """`1536` as `1.5 KiB`."""
    for unit in UNITS[:-1]:
        if size < 1024:
            return f"{size:.4g} {unit}" if size >= 999.5 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.4g} {UNITS[-1]}"


def grouped(number: float) -> str:
    """`26449.7` as `26 450`: thousands apart, no more digits than say something."""
    return f"{number:,.0f}".replace(",", " ") if number >= 999.5 else f"{number:.3g}"


def ratio(number: float) -> str:
    """`437.2` as `440`: two digits say how many times as much, and never as a power of ten."""
    return grouped(float(f"{number:.2g}"))


def parse_bytes(text: str) -> int:
    """`8GiB`, `512 MiB`, `24GB` (decimal) or a plain number of bytes.

    Raises:
        ConfigError: none of those, nothing above 0, more than there is, or a number so small that its unit is missing.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(?:([KMGT])(i?))?(B?)", text.strip(), re.IGNORECASE)
    if not match:
        raise ConfigError(f"{text!r} is no amount of memory. Write it as 8GiB, 512MiB, 24GB, or in bytes.")
    number, prefix, binary, unit = match.groups()
    amount = float(number) * (1024 if binary else 1000) ** ("KMGT".index(prefix.upper()) + 1 if prefix else 0)
    if 0 < amount < BARE and not (prefix or unit):
        raise ConfigError(f"{text!r} has no unit, so it would be bytes. Did you mean {_meant(number)}?")
    if not 1 <= amount < MOST:
        raise ConfigError(f"{text!r} is no memory that a device has. Write it as 8GiB, 512MiB, 24GB, or in bytes.")
    return int(amount)


def _meant(number: str) -> str:
    return f"{number}GiB" if float(number) < 1024 else f"{number}MiB"


def _require_memory(size: int) -> int:
    if LEAST <= size < MOST:
        return size
    meant = f"Did you mean {size * 2**30} ({size} GiB)?" if size < 1024 else "Correct it."
    raise ConfigError(f"{shown_bytes(size)} is no memory in which a model is trained; it is given in bytes. {meant}")


MemoryBytes = Annotated[int, Field(strict=True, ge=1, lt=2**64), AfterValidator(_require_memory)]
"""Of a section of params.yaml."""

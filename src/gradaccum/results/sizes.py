"""Bytes as people read and write them, and how many of a budget to leave free."""

from __future__ import annotations

import re

from gradaccum.errors import ConfigError

HEADROOM = 0.1
"""Share of a memory budget that stays free: for the allocator, and for what kernels take for themselves."""

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def shown_bytes(size: float) -> str:
    """`1536` as `1.5 KiB`."""
    for unit in UNITS[:-1]:
        if size < 1024:
            return f"{size:.4g} {unit}" if size >= 999.5 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.4g} {UNITS[-1]}"


def parse_bytes(text: str) -> int:
    """`8GiB`, `512 MiB`, `24GB` (decimal) or a plain number of bytes.

    Raises:
        ConfigError: none of those, or nothing above 0.
    """
    match = re.fullmatch(r"([\d.]+)\s*(?:([KMGT])(i?))?B?", text.strip(), re.IGNORECASE)
    try:
        number, prefix, binary = match.groups() if match else ("", "", "")
        size = int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(prefix.upper()) + 1 if prefix else 0))
    except ValueError:
        size = 0
    if size < 1:
        raise ConfigError(f"{text!r} is no amount of memory. Write it as 8GiB, 512MiB, 24GB, or in bytes.")
    return size

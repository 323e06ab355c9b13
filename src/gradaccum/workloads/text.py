"""The bundled text: terms and definitions, in ASCII."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from gradaccum.errors import ConfigError

PATH = Path("data/dictionary.jsonl")
HELD_OUT = 10
"""Every tenth entry is for validation."""


@dataclass(frozen=True)
class Entry:
    """One entry of the dictionary."""

    term: str
    definition: str


def entries() -> tuple[list[Entry], list[Entry]]:
    """Training and held-out entries, in the file's order."""
    try:
        lines = PATH.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise ConfigError(
            f"{PATH} is missing from {Path.cwd()}, and the workload reads its text there. Run from the project's root."
        ) from error
    everything = [Entry(**json.loads(line)) for line in lines]
    train = [entry for index, entry in enumerate(everything) if index % HELD_OUT]
    return train, everything[::HELD_OUT]

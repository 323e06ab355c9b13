"""An outcome as a person reads it in the terminal."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradaccum.results.outcome import Outcome


def show(outcome: Outcome, console: Console) -> None:
    """The table and the findings, each of these a line however narrow the terminal, so that it can be copied."""
    table = Table(title=outcome.curve.stage, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, first in outcome.summary[0].items():
        table.add_column(name, justify="left" if cell(first)[:1].isalpha() else "right")
    for row in outcome.summary:
        table.add_row(*(Text(cell(value)) for value in row.values()))
    console.print(table)
    for finding in outcome.findings:
        console.print(f"- {finding}", markup=False, soft_wrap=True)


def cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

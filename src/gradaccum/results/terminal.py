"""An outcome as a person reads it in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradaccum.results.outcome import Outcome

LEFT_OUT_FIRST = (
    "noise scale by quarter",
    "parameters",
    "gradients",
    "gathered kB",
    "reduced kB",
    "disturbed",
    "of matmul peak",
    "max param diff",
    "95 % interval",
    "temporaries",
    "lr",
    "state",
    "syncs",
    "accuracy",
    "inputs",
    "max grad diff",
    "steps",
)
"""Columns that a narrow table does without, the first of these first; then those at its end."""

PROSE = 16
"""Sentences are folded between words, at no less than this width. Nothing else is: half a number is another number."""


@dataclass(frozen=True)
class Column:
    """One column: its name and its cells as they are printed."""

    name: str
    cells: Sequence[str]

    @property
    def is_prose(self) -> bool:
        return self.name == "why"

    @property
    def least(self) -> int:
        """The width with the name folded between its words, and sentences too."""
        longest = max(map(len, self.cells))
        return max(min(longest, PROSE) if self.is_prose else longest, *map(len, self.name.split()))

    def unfolded(self, spare: int) -> int:
        """How much of the spare width it takes: a name needs all that it lacks, sentences take what there is."""
        lacking = max(map(len, (self.name, *self.cells))) - self.least
        return min(spare, lacking) if self.is_prose or lacking <= spare else 0

    @property
    def justify(self) -> Any:
        return "left" if self.cells[0][:1].isalpha() else "right"


def show(outcome: Outcome, console: Console) -> None:
    """The table and the findings, each of these a line however narrow the terminal, so that it can be copied."""
    columns = [Column(name, [cell(row[name]) for row in outcome.summary]) for name in outcome.summary[0]]
    shown = fitting(columns, console.width)
    console.print(table(outcome.curve.stage, shown, console.width))
    if hidden := [column.name for column in columns if column not in shown]:
        console.print(
            f"(Left out, for want of width: {', '.join(hidden)}. A terminal of {taken(columns)} columns shows all; a "
            f"stage's files, in outputs/{outcome.curve.stage}, hold them.)",
            markup=False,
            soft_wrap=True,
        )
    for finding in outcome.findings:
        console.print(f"- {finding}", markup=False, soft_wrap=True)


def fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """Those that fit side by side without folding or cutting a cell: all, or all but the least telling."""
    shown = list(columns)
    names = [column.name for column in columns]
    order = [name for name in LEFT_OUT_FIRST if name in names]
    for name in [*order, *(name for name in reversed(names[1:]) if name not in order)]:
        if taken(shown) <= width:
            break
        shown = [column for column in shown if column.name != name]
    return shown


def taken(columns: Sequence[Column]) -> int:
    """The narrowest that these columns can stand side by side: two spaces apart, one before the first."""
    return 1 + sum(column.least + 2 for column in columns)


def table(title: str, columns: Sequence[Column], width: int) -> Table:
    """What width is left unfolds sentences and names, from the left."""
    made = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    spare = max(0, width - taken(columns))
    for column in columns:
        more = column.unfolded(spare)
        spare -= more
        made.add_column(column.name, justify=column.justify, width=column.least + more)
    for row in zip(*(column.cells for column in columns), strict=True):
        made.add_row(*map(Text, row))
    return made


def cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

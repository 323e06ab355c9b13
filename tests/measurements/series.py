"""Series over steps, as a rebuilt run has them."""

from __future__ import annotations

from pathlib import Path

from gradaccum.results.files import read_csv, read_curve, write_outcome
from gradaccum.results.outcome import Outcome
from gradaccum.results.series import read_back

Lines = dict[str, list[tuple[int, float | None]]]


def logged_and_read_back(outcome: Outcome, root: Path) -> tuple[Lines, Lines]:
    """What the measurement gives to the tracker, and what its files give back."""
    curve, *tables = (path for path in write_outcome(outcome, root) if path.name != "metrics.json")
    again = read_back(read_curve(curve), {table.stem: read_csv(table) for table in tables})
    first, second = (
        {line.name: list(zip(line.steps, line.values, strict=True)) for line in lines}
        for lines in (outcome.series, again)
    )
    return first, second

"""Tables that stages printed on one machine (tables.json: the columns' names, then the rows), in narrow terminals."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import gradaccum
from gradaccum.results.curve import Curve
from gradaccum.results.outcome import Outcome
from gradaccum.results.terminal import LEFT_OUT_FIRST, cell, show

TABLES: dict[str, list[list[Any]]] = json.loads(Path(__file__).with_name("tables.json").read_text())

TELLING = {
    "equivalence": {"optimizer", "cut", "steps", "float64 state rel", "verdict"},
    "ablation": {"variant", "N", "grad norm ratio", "param diff at step 1", "final loss"},
    "throughput": {"effective batch", "micro x N", "samples/s", "median step ms", "95 % interval"},
    "memory": {"micro x N", "predicted", "tally", "error", "seen outside"},
    "plan": {"micro-batch", "N", "memory", "ms/step", "samples/s", "why"},
    "efficiency": {"effective batch", "validation loss", "above the smallest", "failed"},
    "scaling": {"rule", "effective batch", "validation loss", "failed runs"},
    "distributed": {"way", "N", "reductions", "median step ms", "verdict"},
}
"""The columns that README sends its readers to, and those that answer the stage's question."""


def printed(stage: str, width: int) -> str:
    names, *rows = TABLES[stage]
    text = io.StringIO()
    summary = [dict(zip(names, row, strict=True)) for row in rows]
    outcome = Outcome({}, Curve(stage, "accum_steps"), summary, findings=["found " * 60])
    show(outcome, Console(file=text, width=width, highlight=False))
    return text.getvalue()


def left_out(output: str) -> set[str]:
    said = [line for line in output.splitlines() if line.startswith("(Left out")]
    return set(said[0].partition(": ")[2].partition(". A terminal")[0].split(", ")) if said else set()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("stage", TABLES)
def test_no_number_verdict_or_name_is_folded_or_cut_and_what_is_left_out_is_said(stage: str, width: int) -> None:
    names, *rows = TABLES[stage]
    output = printed(stage, width)
    table = output.partition("(Left out")[0].partition("- found")[0]
    body = [line for line in table.partition("───")[2].splitlines()[1:] if line.strip()]

    hidden = left_out(output)
    assert hidden.isdisjoint(TELLING[stage])
    assert max(map(len, table.splitlines())) <= width
    assert len(body) == len(rows)
    for line, row in zip(body, rows, strict=True):
        whole = " ".join(cell(value) for name, value in zip(names, row, strict=True) if name not in hidden)
        assert line.split() == whole.split()


@pytest.mark.parametrize("stage", TABLES)
def test_every_column_is_shown_where_the_terminal_is_as_wide_as_is_said(stage: str) -> None:
    said = printed(stage, 80).partition("A terminal of ")[2].partition(" columns")[0]
    assert left_out(printed(stage, int(said or 80))) == set()
    assert not said or left_out(printed(stage, int(said) - 1))


def test_sentences_fold_between_words_before_a_column_is_left_out() -> None:
    output = printed("plan", 68)
    assert "why" in output
    assert left_out(output) == set()
    assert left_out(printed("plan", 50)) == {"why"}


def test_a_finding_is_a_line_however_narrow_the_terminal() -> None:
    assert "- " + "found " * 60 in printed("plan", 40).splitlines()


def test_the_columns_are_those_that_stages_print_today() -> None:
    sources = Path(gradaccum.__file__).parent.glob("measurements/*.py")
    written = "\n".join(source.read_text() for source in sources)
    names = {name for table in TABLES.values() for name in table[0]}
    assert [name for name in names if f'"{name}":' not in written] == []
    assert set(LEFT_OUT_FIRST) <= names

"""What a run says, in MLflow's terms but without MLflow: names it takes, values it takes, nothing dropped."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradaccum.results.curve import REQUIRED, Curve
from gradaccum.results.outcome import StepSeries

PARAM_LIMIT = 6000  # characters, MLflow's own
TAG_LIMIT = 5000  # characters, that of older servers
Lines = dict[str, list[tuple[int, Any]]]

DESCRIPTION = "mlflow.note.content"

_CUT = " ..."
_CUT_MARK = f"{_CUT} cut, whole in params/"
_NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]")
_PARTS_OF_A_NAME = re.compile(r"/{2,}|(?<![^/])\.{1,2}(?![^/])")


@dataclass(frozen=True)
class Sample:
    """One value of one metric. `rank` is its place in its line: time stamps rise with it."""

    name: str
    value: float
    step: int = 0
    rank: int = 0


@dataclass(frozen=True)
class Measured:
    """Samples; and of each line that should have been finite throughout, where it was not."""

    samples: tuple[Sample, ...]
    not_finite: Mapping[str, str]

    def __add__(self, other: Measured) -> Measured:
        return Measured(self.samples + other.samples, {**self.not_finite, **other.not_finite})

    @property
    def tags(self) -> dict[str, str]:
        """One tag, however many lines: among dozens nobody finds the others."""
        told = [f"{name}: {where}" for name, where in self.not_finite.items()]
        return {"not_finite": cut_text("; ".join(told), TAG_LIMIT)} if told else {}


def described(question: str, said: Sequence[str]) -> dict[str, str]:
    """The run's description, as a tag: the question that its stage asks, and what was found, a line each."""
    text = "\n\n".join(part for part in (question, "\n".join(f"- {line}" for line in said)) if part)
    return {DESCRIPTION: cut_text(text, TAG_LIMIT)} if text else {}


def cut_text(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - len(_CUT)]}{_CUT}"


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested params as `section.key` -> text; strings as they are, the rest as JSON."""
    flat: dict[str, str] = {}
    for key, value in params.items():
        name = metric_name(f"{prefix}{key}")
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat


def cut_params(flat: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Params within MLflow's length limit, and the whole text of those that were cut, by file name."""
    cut, whole = dict(flat), {}
    for name, text in flat.items():
        if len(text) > PARAM_LIMIT:
            file = f"{name.replace('/', '_')}.txt"
            mark = f"{_CUT_MARK}{file}"
            cut[name], whole[file] = text[: PARAM_LIMIT - len(mark)] + mark, text
    return cut, whole


def results(metrics: Mapping[str, Any], curve: Curve, prefix: str = "") -> Measured:
    """The headline, one sample a number (`true` is 1), and a line for every field that is a number on the curve.

    A headline named like a line is the line's end, which MLflow shows as the metric's value: it is left to the line,
    else it would be a stray point at step 0 of its chart. One that is not its end is named `<line>/headline`.
    A null here is what there is none of (the best arm's distance to itself, say), and is no news.
    """
    numeric = {name for point in curve.points for name, value in point.items() if isinstance(value, int | float)}
    ends = _lines(curve, prefix, {name for point in curve.points for name in point})
    heads: Lines = {}
    for name, value in metrics.items():
        line = ends.get(f"{prefix}{name}")
        if _is_number(value) and not (line and line[-1][1] == value):
            heads[f"{prefix}{name}/headline" if line else f"{prefix}{name}"] = [(0, value)]
    lines = heads | _lines(curve, prefix, numeric - set(REQUIRED))
    return _measured({name: [each for each in line if each[1] is not None] for name, line in lines.items()})


def series_lines(series: Iterable[StepSeries]) -> Measured:
    return _measured({line.name: list(zip(line.steps, line.values, strict=True)) for line in series})


def _lines(curve: Curve, prefix: str, fields: set[str]) -> Lines:
    """`<series>/<field>` against the curve's x."""
    lines: Lines = {}
    for series, points in curve.series().items():
        for name in sorted(fields):
            line = [(point[curve.x], point[name]) for point in points if _is_number(point.get(name, ""))]
            if line:
                lines[f"{prefix}{series}/{name}"] = line
    return lines


def metric_name(name: str) -> str:
    """The name in the characters that MLflow allows, a path that resolves to itself."""
    return _PARTS_OF_A_NAME.sub("_", _NOT_IN_A_NAME.sub("_", name)).strip("/")[:250] or "_"


def digest(data: Any) -> str:
    """A short digest of JSON-like data, equal for equal data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def _measured(lines: Lines) -> Measured:
    samples: list[Sample] = []
    not_finite: dict[str, str] = {}
    for raw, line in lines.items():
        name = metric_name(raw)
        finite = [(step, value) for step, value in line if value is not None and math.isfinite(value)]
        samples += [Sample(name, float(value), step, rank) for rank, (step, value) in enumerate(finite)]
        lost = [(step, value) for step, value in line if value is None or not math.isfinite(value)]
        if lost:
            not_finite[name] = _named(lost)
    return Measured(tuple(samples), not_finite)


def _named(lost: list[tuple[int, Any]]) -> str:
    """`null at step 3 to 9 (7 values), inf at step 2`: which values are no numbers, and where."""
    steps: dict[str, list[int]] = {}
    for step, value in lost:
        steps.setdefault("null" if value is None else str(value), []).append(step)
    return ", ".join(
        f"{value} at step {at[0]}" + (f" to {at[-1]} ({len(at)} values)" if len(at) > 1 else "")
        for value, at in steps.items()
    )

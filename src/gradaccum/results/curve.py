"""The accum-curve.v1 schema: a stage's measurements along the accumulation axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gradaccum.errors import GradaccumError

SCHEMA = "accum-curve.v1"
REQUIRED = ("series", "effective_batch", "accum_steps", "micro_batch", "world_size")

Axis = Literal["effective_batch", "accum_steps"]
Point = Mapping[str, Any]


class CurveError(GradaccumError, ValueError):
    """Data that is no accum-curve.v1."""


@dataclass(frozen=True)
class Curve:
    """Points of one stage, told apart by `series`, along `x`.

    Each point carries `series`, `effective_batch`, `accum_steps`, `micro_batch`, `world_size` and the stage's own
    fields. An uneven cut carries `cut` (its sizes) and a null `micro_batch`. Numbers are finite; what was not measured
    is null.
    """

    stage: str
    x: Axis
    points: tuple[Point, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if self.x not in ("effective_batch", "accum_steps"):
            raise CurveError(f"x={self.x!r} is no axis of {SCHEMA}. Use 'effective_batch' or 'accum_steps'.")
        for index, point in enumerate(self.points):
            _check(index, point)

    def series(self) -> dict[str, list[Point]]:
        """The points of each series, along x."""
        lines: dict[str, list[Point]] = {}
        for point in self.points:
            lines.setdefault(point["series"], []).append(point)
        return {name: sorted(points, key=lambda point: point[self.x]) for name, points in lines.items()}

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "stage": self.stage, "x": self.x, "points": [dict(point) for point in self.points]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Curve:
        if data.get("schema") != SCHEMA:
            raise CurveError(f"schema is {data.get('schema')!r}, not {SCHEMA!r}: this is another kind of file.")
        return cls(stage=data["stage"], x=data["x"], points=tuple(data["points"]))


def _check(index: int, point: Point) -> None:
    missing = [name for name in REQUIRED if name not in point]
    if missing:
        raise CurveError(f"point {index} of the curve lacks {', '.join(missing)}.")
    if point["micro_batch"] is None and "cut" not in point:
        raise CurveError(f"point {index} of the curve has neither a micro_batch nor a cut.")
    for name, value in point.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise CurveError(f"point {index} of the curve has {name}={value}, which JSON cannot hold. Use null.")


def outer_join(main: Curve, others: Mapping[str, Sequence[Point]], *, on: str = "accum_steps") -> Curve:
    """The main curve's points, each with the fields of the others' points of the same `on`, named `<stage>/<field>`.

    A value of `on` that only another curve has becomes a point of series `<stage>`; a field that the main curve lacks
    there is left out.
    """
    joined: dict[Any, dict[str, Any]] = {point[on]: dict(point) for point in main.points}
    for stage, points in others.items():
        for point in points:
            target = joined.setdefault(point[on], {name: point[name] for name in REQUIRED} | {"series": stage})
            own = {name: value for name, value in point.items() if name not in (*REQUIRED, "cut")}
            target.update({f"{stage}/{name}": value for name, value in own.items()})
    return Curve(stage="report", x=main.x, points=tuple(joined[key] for key in sorted(joined)))

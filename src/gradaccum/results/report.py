"""What the stages say together: the joined curve, the tables that DVC draws, the figures, the recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gradaccum.results import figures
from gradaccum.results.claims import claims, page
from gradaccum.results.curve import Curve, Point, outer_join
from gradaccum.results.files import (
    OUTPUTS,
    read_csv,
    read_curve,
    read_json,
    write_bytes,
    write_csv,
    write_json,
    write_text,
)
from gradaccum.results.outcome import Metrics, Row, Table
from gradaccum.results.recipe import recipe
from gradaccum.results.sentences import QUARTERS
from gradaccum.results.worth import why_untimed, worth_section, worth_table


@dataclass(frozen=True)
class Measured:
    """What the stages wrote: curves and metrics by stage, tables by file name, and the machine they ran on."""

    curves: Mapping[str, Curve]
    metrics: Mapping[str, Metrics]
    tables: Mapping[str, Table]
    machine: Metrics

    @classmethod
    def read(cls, root: Path = OUTPUTS) -> Measured:
        stages = ("throughput", "equivalence", "ablation", "memory", "plan", "efficiency", "scaling", "distributed")
        tables = (("ablation", "losses"), ("efficiency", "learning"), ("throughput", "frontier"))
        return cls(
            curves={stage: read_curve(root / stage / "accum-curve.json") for stage in stages},
            metrics={stage: read_json(root / stage / "metrics.json") for stage in stages},
            tables={name: read_csv(root / stage / f"{name}.csv") for stage, name in tables},
            machine=read_json(root / "environment.json"),
        )


def write_report(measured: Measured, root: Path = OUTPUTS) -> list[Path]:
    """Write the joined curve, the recipe, and the report's tables and figures; returns their paths."""
    tables = {
        "throughput": throughput_table(measured.curves["throughput"]),
        "equivalence": equivalence_table(measured.curves["equivalence"]),
        "ablation": ablation_table(measured.tables["losses"]),
        "memory": memory_table(measured.curves["memory"]),
        "plan": plan_table(measured.curves["plan"]),
        "efficiency": efficiency_table(measured.curves["efficiency"]),
        "distributed_bytes": distributed_table(measured.curves["distributed"], "reduced_bytes"),
        "distributed_time": distributed_table(measured.curves["distributed"], "median_step_ms"),
        "worth": worth_table(measured.curves["efficiency"], measured.curves["throughput"]),
    }
    drawn = [figures.of_stage(curve, measured.tables) for curve in measured.curves.values()]
    untimed = why_untimed(measured.curves["efficiency"], measured.curves["throughput"])
    drawn.append({"worth.png": figures.worth(tables["worth"], measured.metrics["efficiency"], untimed=untimed)})
    worth = worth_section(tables["worth"], measured.curves, measured.metrics)
    return [
        write_json(root / "accum-curve.json", joined_curve(measured.curves).to_json()),
        write_text(
            root / "skill-gradient-accumulation.md",
            recipe(measured.metrics, measured.curves, measured.machine, worth=worth),
        ),
        write_text(
            root / "report" / "claims.md",
            page(
                claims(
                    measured.metrics["efficiency"],
                    measured.metrics["scaling"],
                    [point["effective_batch"] for point in measured.curves["efficiency"].points],
                ),
                measured.curves["efficiency"],
                measured.curves["scaling"],
            ),
        ),
        *(write_csv(root / "report" / f"{name}.csv", rows) for name, rows in tables.items()),
        *(write_bytes(root / "report" / name, image) for images in drawn for name, image in images.items()),
    ]


def joined_curve(curves: Mapping[str, Curve]) -> Curve:
    """The throughput points, with the main (first) series of every other stage, joined on `accum_steps`."""
    others = {stage: main_series(curve) for stage, curve in curves.items() if stage != "throughput"}
    return outer_join(curves["throughput"], others)


def main_series(curve: Curve) -> list[Point]:
    return next(iter(curve.series().values()))


def throughput_table(curve: Curve) -> Table:
    keys = ("effective_batch", "accum_steps", "samples_per_sec", "median_step_ms", "fitted_step_ms", "avg_loss")
    return [{key: point[key] for key in keys} for point in main_series(curve)]


def equivalence_table(curve: Curve) -> Table:
    """One row an equal cut, one column an optimizer: the gradient's relative difference in float64."""
    even = {name: points for name, points in curve.series().items() if "/" not in name}
    return list(_wide(even, "accum_steps", "grad_rel_diff_float64"))


def ablation_table(losses: Table) -> Table:
    """One row a step, one column a variant, at the largest number of accumulation steps."""
    most = max(int(row["accum_steps"]) for row in losses)
    series: dict[str, list[Row]] = {}
    for row in losses:
        if int(row["accum_steps"]) == most:
            series.setdefault(row["series"], []).append({"step": int(row["step"]), "loss": row["loss"]})
    return list(_wide(series, "step", "loss"))


def memory_table(curve: Curve) -> Table:
    """One row a micro-batch, at the largest N: the predicted peak, and what it is for."""
    most = max(point["accum_steps"] for point in curve.points)
    keys = [key for key in curve.points[0] if key.endswith("_bytes")]
    return [
        {"micro_batch": each["micro_batch"], **{key: each[key] for key in keys}}
        for each in curve.points
        if each["accum_steps"] == most
    ]


def plan_table(curve: Curve) -> Table:
    """One row a way to reach the target."""
    keys = ("micro_batch", "accum_steps", "predicted_bytes", "predicted_step_ms", "fits", "chosen")
    return [{key: point[key] for key in keys} for point in main_series(curve)]


def efficiency_table(curve: Curve) -> Table:
    """One row an arm."""
    keys = (
        "effective_batch",
        "steps",
        "lr",
        "validation_loss",
        "loss_above_reference",
        "validation_accuracy",
        *QUARTERS,
    )
    return [{key: point[key] for key in keys} for point in main_series(curve)]


def distributed_table(curve: Curve, y: str) -> Table:
    """One row an N, one column a way to spread a window over ranks, without what was not timed."""
    timed = {name: [each for each in points if y in each] for name, points in curve.series().items()}
    return list(_wide({name: points for name, points in timed.items() if points}, "accum_steps", y))


def _wide(series: Mapping[str, list[Row]] | Mapping[str, list[Point]], x: str, y: str) -> Iterator[Row]:
    """One row an x, one column a series; empty where a series has no such x."""
    columns = {name: {row[x]: row[y] for row in rows} for name, rows in series.items()}
    for value in sorted({row[x] for rows in series.values() for row in rows}):
        yield {x: value, **{name: column.get(value) for name, column in columns.items()}}

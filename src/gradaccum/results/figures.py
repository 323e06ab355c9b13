"""The figures of each stage, drawn from its curve and tables, as PNG bytes.

Beside `canvas` and `value_figures` the only user of matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import cycle
from typing import Any

from matplotlib.figure import Figure

from gradaccum.results import cost_figures, value_figures
from gradaccum.results.canvas import column as _column
from gradaccum.results.canvas import finish as _finish
from gradaccum.results.canvas import log2 as _log2
from gradaccum.results.canvas import new_axes as _axes
from gradaccum.results.canvas import png as _png
from gradaccum.results.curve import Curve
from gradaccum.results.outcome import Table

Tables = Mapping[str, Table]

SHARP = 1e-12
"""The bound that the equivalence stage holds float64 to."""


def of_stage(curve: Curve, tables: Tables) -> dict[str, bytes]:
    """The figures of a stage by their file names; empty where it has none."""
    return {f"{name}.png": _png(draw(curve, tables)) for name, draw in _DRAW.get(curve.stage, {}).items()}


def worth(rows: Table, efficiency: Mapping[str, Any], *, untimed: str | None) -> bytes:
    """The report's own: time to the target losses against the effective batch."""
    return _png(value_figures.worth(rows, efficiency, untimed=untimed))


def equivalence(curve: Curve, tables: Tables) -> Figure:
    """Gradient differences to the full batch, in float64 and float32; 0 is exact."""
    del tables
    figure, (sharp, single) = _axes(2)
    for axes, key, title, exact in (
        (sharp, "grad_rel_diff_float64", "float64: over the summed magnitudes", 1e-17),
        (single, "max_grad_diff", "float32: largest absolute", 1e-10),
    ):
        for (name, points), marker in zip(curve.series().items(), cycle("osv^"), strict=False):
            wrong = name.startswith("control/")
            axes.plot(
                _column(points, "accum_steps"),
                _column(points, key),
                label=name,
                alpha=0.7,
                marker="x" if wrong else marker,
                color="red" if wrong else None,
            )
        _log2(axes, [point["accum_steps"] for point in curve.points])
        axes.set_yscale("symlog", linthresh=exact)
        axes.set(ylim=(0, 100), ylabel="gradient difference to the full batch", title=title)
    sharp.axhline(SHARP, color="0.6", linestyle="--", label="bound")
    return _finish(figure, (sharp, single), "accumulation steps N")


def ablation(curve: Curve, tables: Tables) -> Figure:
    """Training loss of every variant at the largest N, one panel an optimizer."""
    most = max(point["accum_steps"] for point in curve.points)
    optimizers = list(dict.fromkeys(point["series"].partition("/")[0] for point in curve.points))
    figure, panels = _axes(len(optimizers))
    for axes, optimizer in zip(panels, optimizers, strict=True):
        names = [name for name in curve.series() if name.startswith(f"{optimizer}/")]
        for name, dashes in zip(names, cycle(["-", "--", ":", "-."]), strict=False):
            rows = [row for row in tables["losses"] if row["series"] == name and int(row["accum_steps"]) == most]
            steps, losses = [int(row["step"]) for row in rows], [float(row["loss"]) for row in rows]
            axes.plot(steps, losses, label=name.partition("/")[2], linestyle=dashes)
        axes.set(yscale="log", ylabel="training loss", title=f"{optimizer}, N={most}")
    return _finish(figure, panels, "optimizer step")


def distributed(curve: Curve, tables: Tables) -> Figure:
    """Bytes reduced in a window, and the step time, against N, for every way over ranks."""
    del tables
    figure, (traffic, time) = _axes(2)
    for (name, points), marker in zip(curve.series().items(), cycle("osv^D"), strict=False):
        timed = [point for point in points if "median_step_ms" in point]
        if not timed:
            continue
        steps = _column(timed, "accum_steps")
        kilobytes = [value / 1000 for value in _column(timed, "reduced_bytes")]
        traffic.plot(steps, kilobytes, label=name, marker=marker, alpha=0.7)
        time.plot(steps, _column(timed, "median_step_ms"), label=name, marker=marker, alpha=0.7)
    for axes in (traffic, time):
        _log2(axes, [point["accum_steps"] for point in curve.points if "median_step_ms" in point])
        axes.set_yscale("log")
    traffic.set(ylabel="kB of gradients reduced a window", title="Synced last: the same, whatever N")
    time.set(ylabel="ms per optimizer step", title="Step time over ranks")
    return _finish(figure, (traffic, time), "accumulation steps N")


_DRAW: Mapping[str, Mapping[str, Callable[[Curve, Tables], Figure]]] = {
    "throughput": {"throughput": cost_figures.throughput},
    "equivalence": {"equivalence": equivalence},
    "ablation": {"ablation": ablation},
    "memory": {"memory": cost_figures.memory},
    "plan": {"plan": cost_figures.plan},
    "efficiency": {"efficiency": value_figures.learning, "noise_scale": value_figures.noise_scale},
    "distributed": {"distributed": distributed},
    "scaling": {"linear_scaling": value_figures.linear_scaling, "half_life": value_figures.half_life},
}

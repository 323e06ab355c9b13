"""The only user of matplotlib: one figure a stage, drawn from its curve and tables, as PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from gradaccum.results.curve import Curve, Point
from gradaccum.results.outcome import Table

Tables = Mapping[str, Table]

SHARP = 1e-12
"""The bound that the equivalence stage holds float64 to."""


def of_stage(curve: Curve, tables: Tables) -> dict[str, bytes]:
    """The figure of a stage by its file name; empty where it has none."""
    draw = _DRAW.get(curve.stage)
    return {f"{curve.stage}.png": _png(draw(curve, tables))} if draw else {}


def throughput(curve: Curve, tables: Tables) -> Figure:
    """Samples per second, and the step time with its fit, against the effective batch."""
    del tables
    figure, (rate, time) = _axes(2)
    for name, points in curve.series().items():
        x = _column(points, "effective_batch")
        rate.plot(x, _column(points, "samples_per_sec"), marker="o", label=name)
        time.plot(x, _column(points, "fitted_step_ms"), color="0.6", label="fit: N x t_micro + t_step")
        medians, low, high = (_column(points, key) for key in ("median_step_ms", "step_ms_p25", "step_ms_p75"))
        spread = [np.subtract(medians, low), np.subtract(high, medians)]
        time.errorbar(x, medians, yerr=spread, marker="o", linestyle="none", label="median, quartiles")
    for axes in (rate, time):
        _log2(axes, [point["effective_batch"] for point in curve.points])
    rate.set(ylabel="samples/s", title="Throughput saturates", ylim=(0, None))
    time.set(yscale="log", ylabel="ms per optimizer step", title="Step time grows with N")
    return _finish(figure, (rate, time), "effective batch (samples)")


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


_DRAW: Mapping[str, Callable[[Curve, Tables], Figure]] = {
    "throughput": throughput,
    "equivalence": equivalence,
    "ablation": ablation,
}


def _axes(columns: int) -> tuple[Figure, tuple[Axes, ...]]:
    figure = Figure(figsize=(5.5 * columns, 4), layout="constrained")
    return figure, tuple(figure.subplots(1, columns, squeeze=False)[0])


def _log2(axes: Axes, values: Iterable[int]) -> None:
    """A logarithmic x axis whose ticks are the measured values."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(values)))
    axes.xaxis.set_major_formatter(ScalarFormatter())


def _finish(figure: Figure, panels: Iterable[Axes], x_label: str) -> Figure:
    for axes in panels:
        axes.set_xlabel(x_label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure


def _column(points: Iterable[Point], key: str) -> list[Any]:
    return [point[key] for point in points]


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()

"""The only user of matplotlib: one figure a stage, drawn from its curve and tables, as PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradaccum.results.curve import Curve, Point
from gradaccum.results.outcome import Table

Tables = Mapping[str, Table]

ROUNDING_FLOOR = 1e-18
"""Where a difference of exactly 0 is drawn on a logarithmic axis."""


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
    rate.set(xscale="log", ylabel="samples/s", title="Throughput saturates", ylim=(0, None))
    time.set(xscale="log", yscale="log", ylabel="ms per optimizer step", title="Step time grows with N")
    return _finish(figure, (rate, time), "effective batch (samples)")


def equivalence(curve: Curve, tables: Tables) -> Figure:
    """Gradient differences to the full batch, in float64 and float32, against accumulation steps."""
    del tables
    figure, (sharp, single) = _axes(2)
    for axes, key, title in (
        (sharp, "grad_rel_diff_float64", "float64: relative to the summed magnitudes"),
        (single, "max_grad_diff", "float32: largest absolute difference"),
    ):
        for name, points in curve.series().items():
            values = [max(value, ROUNDING_FLOOR) for value in _column(points, key)]
            axes.plot(_column(points, "accum_steps"), values, marker="o", label=name, alpha=0.8)
        axes.set(xscale="log", yscale="log", ylabel="gradient difference to the full batch", title=title)
    sharp.axhline(1e-12, color="0.6", linestyle="--", label="bound")
    return _finish(figure, (sharp, single), "accumulation steps N")


def ablation(curve: Curve, tables: Tables) -> Figure:
    """Training loss of every variant at the largest N, one panel an optimizer."""
    most = max(point["accum_steps"] for point in curve.points)
    optimizers = list(dict.fromkeys(point["series"].partition("/")[0] for point in curve.points))
    figure, panels = _axes(len(optimizers))
    for axes, optimizer in zip(panels, optimizers, strict=True):
        for name in (name for name in curve.series() if name.startswith(f"{optimizer}/")):
            rows = [row for row in tables["losses"] if row["series"] == name and int(row["accum_steps"]) == most]
            axes.plot(
                [int(row["step"]) for row in rows],
                [float(row["loss"]) for row in rows],
                label=name.partition("/")[2],
                linestyle="--" if name.endswith("scaled") else "-",
            )
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

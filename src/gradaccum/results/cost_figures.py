"""Figures of what accumulation costs, and of what to set; matplotlib's user beside `figures`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradaccum.results.canvas import column, finish, log2, new_axes
from gradaccum.results.curve import Curve
from gradaccum.results.outcome import Row, Table
from gradaccum.results.sizes import shown_bytes

Tables = Mapping[str, Table]

MEMORY_KINDS = ("parameters", "gradients", "optimizer_state", "inputs", "activations", "temporaries")


def throughput(curve: Curve, tables: Tables) -> Figure:
    """Samples per second and step time with its fit at a fixed micro-batch; step time at a fixed effective batch."""
    figure, (rate, time, frontier) = new_axes(3)
    for name, points in curve.series().items():
        x = column(points, "effective_batch")
        medians, low, high = _medians_and_ends(points)
        per_second = [1000 * np.divide(x, each) for each in (medians, high, low)]
        _with_interval(rate, x, *per_second, label=f"{name}, 95 % interval")
        time.plot(x, column(points, "fitted_step_ms"), color="0.6", label="fit: N x t_micro + t_step")
        _with_interval(time, x, medians, low, high, label="median, 95 % interval", linestyle="none")
    rows = tables["frontier"]
    _with_interval(frontier, _numbers(rows, "micro_batch"), *_medians_and_ends(rows), label="median, 95 % interval")
    for axes in (rate, time):
        log2(axes, [point["effective_batch"] for point in curve.points])
    log2(frontier, [int(micro) for micro in _numbers(rows, "micro_batch")])
    rate.set(ylabel="samples/s", title="Throughput saturates", ylim=(0, None))
    time.set(yscale="log", ylabel="ms per optimizer step", title="Step time grows with N")
    whole = int(_numbers(rows, "effective_batch")[0])
    frontier.set(yscale="log", ylabel="ms per optimizer step", title=f"Effective batch {whole}, cut finer")
    finish(figure, (rate, time), "effective batch (samples)")
    return finish(figure, (frontier,), "micro-batch (samples)")


def memory(curve: Curve, tables: Tables) -> Figure:
    """What the peak is made of at the largest N, by micro-batch; predicted and seen peaks against N."""
    del tables
    figure, (kinds, peaks) = new_axes(2)
    most = max(point["accum_steps"] for point in curve.points)
    bars = sorted((each for each in curve.points if each["accum_steps"] == most), key=lambda each: each["micro_batch"])
    names = [f"{each['micro_batch']}\n{shown_bytes(each['predicted_bytes'])}" for each in bars]
    below = np.zeros(len(bars))
    for kind in MEMORY_KINDS:
        shares = np.divide(column(bars, f"{kind}_bytes"), column(bars, "predicted_bytes"))
        kinds.bar(names, shares, bottom=below, label=kind.replace("_", " "))
        below += shares
    for name, points in curve.series().items():
        steps = column(points, "accum_steps")
        (line,) = peaks.plot(steps, column(points, "predicted_bytes"), label=name.partition("/")[2])
        for key, marker in (("tally_bytes", "o"), ("process_bytes", "x"), ("device_bytes", "+")):
            seen = [(x, each[key]) for x, each in zip(steps, points, strict=True) if each[key] is not None]
            peaks.plot(*zip(*seen, strict=True) if seen else ((), ()), marker, color=line.get_color(), alpha=0.7)
    log2(peaks, column(curve.points, "accum_steps"))
    kinds.set(ylabel="share of the peak", ylim=(0, 1.5), title=f"What memory is for, N={most}")  # room for the legend
    peaks.set(yscale="log", ylabel="bytes", title="Predicted (line), tallied (o), seen outside (x)")
    finish(figure, (kinds,), "micro-batch (samples), predicted peak")
    return finish(figure, (peaks,), "accumulation steps N")


def plan(curve: Curve, tables: Tables) -> Figure:
    """Every way to reach the target: step time against memory, or memory alone where no times were measured."""
    del tables
    figure, (axes,) = new_axes(1)
    timed = curve.points[0]["predicted_step_ms"] is not None
    height = "predicted_step_ms" if timed else "accum_steps"
    for fits, colour, label in ((True, "C0", "fits"), (False, "C3", "does not fit")):
        some = [each for each in curve.points if each["fits"] == fits]
        axes.plot(column(some, "predicted_bytes"), column(some, height), "o", color=colour, label=label)
    chosen = [each for each in curve.points if each["chosen"]]
    axes.plot(
        column(chosen, "predicted_bytes"),
        column(chosen, height),
        "o",
        ms=14,
        mfc="none",
        color="C2",
        label="proposed",
    )
    for each in curve.points:
        cut = f"{each['micro_batch']} x {each['accum_steps']}"
        axes.annotate(
            cut, (each["predicted_bytes"], each[height]), (6, 4), textcoords="offset points", fontsize="small"
        )
    axes.set(xscale="log", yscale="log", ylabel="ms per optimizer step" if timed else "accumulation steps N")
    axes.set_title(f"Effective batch {curve.points[0]['effective_batch']}: time against memory (micro-batch x N)")
    return finish(figure, (axes,), "predicted memory (bytes)")


def _medians_and_ends(rows: Iterable[Row]) -> tuple[list[float], ...]:
    rows = list(rows)
    return tuple(_numbers(rows, key) for key in ("median_step_ms", "step_ms_low", "step_ms_high"))


def _with_interval(axes: Axes, x: Any, middle: Any, low: Any, high: Any, **style: Any) -> None:
    below, above = np.subtract(middle, low), np.subtract(high, middle)
    axes.errorbar(x, middle, yerr=[np.maximum(below, 0), np.maximum(above, 0)], marker="o", capsize=2, **style)


def _numbers(rows: Iterable[Row], key: str) -> list[float]:
    """A column as numbers, which rows read from a CSV hold as text; NaN, which is not drawn, where there is none."""
    return [math.nan if row[key] in (None, "") else float(row[key]) for row in rows]

"""Figures of what accumulation costs, and of what to set; matplotlib's user beside `figures`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradaccum.results.canvas import PALETTE, column, finish, log2, new_axes, plain, plain_log
from gradaccum.results.curve import Curve, Point
from gradaccum.results.fits import FLAT
from gradaccum.results.outcome import Row, Table
from gradaccum.results.sizes import grouped, shown_bytes

Tables = Mapping[str, Table]

MIB = 2**20

MEMORY_KINDS = {  # with what tells them apart without colours
    "parameters": "",
    "gradients": "//",
    "optimizer_state": "..",
    "inputs": "",
    "activations": "xx",
    "temporaries": "\\\\",
}

SEEN = {
    "tally_bytes": ("o", "tallied on real tensors"),
    "process_bytes": ("x", "seen by the system"),
    "device_bytes": ("+", "seen by the device"),
}

BESIDE: Mapping[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.02), "fontsize": "small"}
"""A legend that hides no data."""

PLAIN = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
"""Behind a label over a line."""


def throughput(curve: Curve, tables: Tables) -> Figure:
    """Samples per second and step time with their fit at a fixed micro-batch; step time at a fixed effective batch."""
    figure, (rate, time, frontier) = new_axes(3)
    for points in curve.series().values():
        _curve(rate, time, points)
    for axes in (rate, time):
        log2(axes, [point["effective_batch"] for point in curve.points])
    rate.set(ylabel="samples/s", title="Throughput saturates", ylim=(0, None))
    plain(rate.yaxis)
    time.set(ylabel="ms per optimizer step", title="Step time grows with N")
    plain_log(time.yaxis)
    rows = tables["frontier"]
    micro = _numbers(rows, "micro_batch")
    _with_interval(frontier, micro, _medians_and_ends(rows), label="median, 95 % interval")
    log2(frontier, map(int, micro))
    whole = int(_numbers(rows, "effective_batch")[0])
    frontier.set(ylabel="ms per optimizer step", title=f"{whole} samples a step, cut finer and finer")
    plain_log(frontier.yaxis)
    finish(figure, (rate, time), "effective batch (samples)")
    rate.legend(loc="lower right", fontsize="small")
    return finish(figure, (frontier,), "micro-batch (samples)")


def _curve(rate: Axes, time: Axes, points: Sequence[Point]) -> None:
    """Points with their intervals over the fitted line, as time and as samples per second."""
    x, fitted = column(points, "effective_batch"), column(points, "fitted_step_ms")
    medians, low, high = times = _medians_and_ends(points)
    time.plot(x, fitted, color="0.5", label="fit: N x t_micro + t_step")
    _with_interval(time, x, times, label="median, 95 % interval", linestyle="none")
    asymptote = 1000 * x[-1] / fitted[-1] / (1 - points[-1]["step_share"])
    within = f"within {100 * FLAT:g} % of the asymptote, {grouped(asymptote)}"
    rate.axhspan((1 - FLAT) * asymptote, asymptote, color="0.88", label=within)
    rate.plot(x, 1000 * np.divide(x, fitted), color="0.5", label="fit")
    ends = [1000 * np.divide(x, each) for each in (medians, high, low)]
    _with_interval(rate, x, ends, label="median, 95 % interval", linestyle="none")


def memory(curve: Curve) -> Figure:
    """What the peak is made of at the largest N, by micro-batch; predicted and seen peaks against N."""
    figure, (kinds, peaks) = new_axes(2)
    figure.set_size_inches(14, 4)
    _kinds(kinds, curve)
    by_size = sorted(curve.series().values(), key=lambda points: -points[0]["micro_batch"])  # as the lines lie
    for points in by_size:
        steps = column(points, "accum_steps")
        label = f"predicted, micro-batch {points[0]['micro_batch']}"
        (line,) = peaks.plot(steps, _mib(column(points, "predicted_bytes")), label=label)
        for key, (marker, _) in SEEN.items():
            seen = [math.nan if each[key] is None else each[key] for each in points]
            peaks.plot(steps, _mib(seen), marker, color=line.get_color(), fillstyle="none", ms=7)
    for key, (marker, meaning) in SEEN.items():
        if any(each[key] is not None for each in curve.points):
            peaks.plot([], [], marker, color="0.4", fillstyle="none", label=meaning)
    log2(peaks, column(curve.points, "accum_steps"))
    peaks.set(ylabel="MiB", title="Peak of a window")
    plain_log(peaks.yaxis)
    finish(figure, (kinds,), "micro-batch (samples), predicted peak")
    finish(figure, (peaks,), "accumulation steps N")
    for axes in (kinds, peaks):
        axes.legend(**BESIDE, reverse=axes is kinds)
    return figure


def _kinds(axes: Axes, curve: Curve) -> None:
    """One bar a micro-batch, from below in the order of the legend from below."""
    most = max(point["accum_steps"] for point in curve.points)
    bars = sorted((each for each in curve.points if each["accum_steps"] == most), key=lambda each: each["micro_batch"])
    names = [f"{each['micro_batch']}\n{shown_bytes(each['predicted_bytes'])}" for each in bars]
    below = np.zeros(len(bars))
    for (kind, hatch), colour in zip(MEMORY_KINDS.items(), PALETTE, strict=False):
        shares = 100 * np.divide(column(bars, f"{kind}_bytes"), column(bars, "predicted_bytes"))
        label = kind.replace("_", " ")
        axes.bar(names, shares, bottom=below, label=label, color=colour, hatch=hatch, edgecolor="white")
        below += shares
    axes.set_axisbelow(True)
    axes.set(ylabel="% of the peak", ylim=(0, 100), title=f"What memory is for, N={most}")


def plan(curve: Curve) -> Figure:
    """Every way to reach the target: step time against memory, or memory alone where no times were measured."""
    figure, (axes,) = new_axes(1)
    figure.set_size_inches(7, 4.5)
    timed = curve.points[0]["predicted_step_ms"] is not None
    height = "predicted_step_ms" if timed else "accum_steps"
    _ways(axes, curve.points, height)
    for each in curve.points:
        where = (each["predicted_bytes"] / MIB, each[height])
        cut = f"{each['micro_batch']} x {each['accum_steps']}"
        axes.annotate(cut, where, (9, 3), textcoords="offset points", fontsize="small", bbox=PLAIN)
    axes.set(ylabel="ms per optimizer step" if timed else "accumulation steps N")
    axes.set_title(f"{curve.points[0]['effective_batch']} samples a step, cut into micro-batch x N")
    axes.margins(x=0.15, y=0.1)
    plain_log(axes.xaxis)
    plain_log(axes.yaxis)
    finish(figure, (axes,), "predicted memory (MiB)")
    axes.legend(**BESIDE)
    return figure


def _ways(axes: Axes, points: Sequence[Point], height: str) -> None:
    axes.plot(_mib(column(points, "predicted_bytes")), column(points, height), color="0.8", zorder=0)
    for style, label, some in (
        ({"marker": "o", "color": PALETTE[0]}, "fits", [each for each in points if each["fits"]]),
        ({"marker": "x", "color": PALETTE[1]}, "does not fit", [each for each in points if not each["fits"]]),
        (
            {"marker": "o", "ms": 13, "mfc": "none", "mew": 2, "color": PALETTE[2]},
            "proposed",
            [each for each in points if each["chosen"]],
        ),
    ):
        if some:
            axes.plot(_mib(column(some, "predicted_bytes")), column(some, height), linestyle="", label=label, **style)


def distributed(curve: Curve) -> Figure:
    """Bytes reduced in a window, and the step time, against N, for every way over ranks."""
    figure, (traffic, time) = new_axes(2)
    series = {name: [each for each in points if "median_step_ms" in each] for name, points in curve.series().items()}
    series = {name: timed for name, timed in series.items() if timed}
    strategies = list(dict.fromkeys(name.partition("/")[0] for name in series))
    for name, timed in series.items():
        style = _style_of_way(name, strategies)
        steps = column(timed, "accum_steps")
        traffic.plot(steps, [value / 1000 for value in column(timed, "reduced_bytes")], label=name, **style)
        time.plot(steps, column(timed, "median_step_ms"), label=name, **style)
        bar = {"color": style["color"], "alpha": style.get("alpha", 1.0), "linewidth": style["linewidth"]}
        reach = [(each["step_ms_low"], each["step_ms_high"]) for each in timed if each["step_ms_low"] is not None]
        if len(reach) == len(steps):
            time.vlines(steps, *zip(*reach, strict=True), **bar)
    for axes in (traffic, time):
        log2(axes, [point["accum_steps"] for points in series.values() for point in points])
        plain_log(axes.yaxis)
    traffic.set(ylabel="kB of gradients", title="Gradients reduced in a window")
    time.set(ylabel="ms per optimizer step (bar: 95 %)", title="Step time over ranks")
    finish(figure, (traffic, time), "accumulation steps N")
    traffic.legend([], frameon=False)
    time.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), labelspacing=1.2)
    return figure


_SYNC_STYLES: Mapping[str, Mapping[str, str]] = {
    "last": {"color": "C0", "marker": "o", "linestyle": "-"},
    "every": {"color": "C3", "marker": "x", "linestyle": "-"},
    "gathered": {"color": "C2", "marker": "^", "linestyle": "--"},
}


def _style_of_way(name: str, strategies: Sequence[str]) -> dict[str, Any]:
    """Ways often coincide, so all show through: a way to sync has colour and marker, the first strategy wide lines."""
    strategy, _, sync = name.partition("/")
    wide = strategies.index(strategy) == 0
    width = {"linewidth": 6, "markersize": 13, "alpha": 0.35} if wide else {"linewidth": 1.5, "markersize": 7}
    return {**_SYNC_STYLES[sync], **width, "fillstyle": "none"}


def _mib(sizes: Iterable[float]) -> Any:
    return np.array(list(sizes)) / MIB


def _medians_and_ends(rows: Iterable[Row]) -> tuple[list[float], ...]:
    rows = list(rows)
    return tuple(_numbers(rows, key) for key in ("median_step_ms", "step_ms_low", "step_ms_high"))


def _with_interval(axes: Axes, x: Any, middle_and_ends: Sequence[Any], **style: Any) -> None:
    middle, low, high = middle_and_ends
    below, above = np.subtract(middle, low), np.subtract(high, middle)
    axes.errorbar(x, middle, yerr=[np.maximum(below, 0), np.maximum(above, 0)], marker="o", ms=5, capsize=4, **style)


def _numbers(rows: Iterable[Row], key: str) -> list[float]:
    """A column as numbers, which rows read from a CSV hold as text; NaN, which is not drawn, where there is none."""
    return [math.nan if row[key] in (None, "") else float(row[key]) for row in rows]

"""What all figures share; beside `figures` and the modules that draw for it the only user of matplotlib."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from gradaccum.results.curve import Point
from gradaccum.results.sizes import grouped

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours that also a colour-blind reader tells apart (Okabe and Ito 2008)."""

MANY_DECADES = 3


def new_axes(columns: int) -> tuple[Figure, tuple[Axes, ...]]:
    figure = Figure(figsize=(5.5 * columns, 4), layout="constrained")
    panels = tuple(figure.subplots(1, columns, squeeze=False)[0])
    for axes in panels:
        axes.set_prop_cycle(color=PALETTE)
    return figure, panels


def log2(axes: Axes, values: Iterable[int]) -> None:
    """A logarithmic x axis whose ticks are the measured values."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(values)))
    plain(axes.xaxis)


def plain(axis: Axis) -> None:
    """Ticks are written as people write numbers, never as powers, on every axis alike."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: grouped(value)))
    axis.set_minor_formatter(NullFormatter())


def plain_log(axis: Axis) -> None:
    """A logarithmic axis whose ticks are 1, 2, 5, 10 ..., or the powers of ten alone where those would be many."""
    axes = axis.axes
    (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
    low, high = axis.get_view_interval()
    decades = np.log10(high / low) if 0 < low < high else 1.0
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < MANY_DECADES else (1,)))
    plain(axis)


def finish(figure: Figure, panels: Iterable[Axes], x_label: str) -> Figure:
    for axes in panels:
        axes.set_xlabel(x_label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure


def finish_with_one_legend(figure: Figure, panels: Sequence[Axes], x_label: str) -> Figure:
    """One legend for all panels, below them, where it hides no data."""
    known: dict[str, Any] = {}
    for axes in panels:
        axes.set_xlabel(x_label)
        axes.grid(alpha=0.3)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            known.setdefault(label, handle)
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=2 * len(panels) + 1, fontsize="small")
    return figure


def column(points: Iterable[Point], key: str) -> list[Any]:
    return [point[key] for point in points]


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()

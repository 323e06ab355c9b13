"""What all figures share; beside `figures`, `cost_figures` and `value_figures` the only user of matplotlib."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from gradaccum.results.curve import Point


def new_axes(columns: int) -> tuple[Figure, tuple[Axes, ...]]:
    figure = Figure(figsize=(5.5 * columns, 4), layout="constrained")
    return figure, tuple(figure.subplots(1, columns, squeeze=False)[0])


def log2(axes: Axes, values: Iterable[int]) -> None:
    """A logarithmic x axis whose ticks are the measured values."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(values)))
    axes.xaxis.set_major_formatter(ScalarFormatter())


def finish(figure: Figure, panels: Iterable[Axes], x_label: str) -> Figure:
    for axes in panels:
        axes.set_xlabel(x_label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure


def column(points: Iterable[Point], key: str) -> list[Any]:
    return [point[key] for point in points]


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()

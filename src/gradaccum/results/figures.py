"""The figures of each stage, drawn from its curve and tables, as PNG bytes.

Beside `canvas`, `cost_figures`, `rightness_figures` and `value_figures` the only user of matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import cycle

from matplotlib.figure import Figure

from gradaccum.results import cost_figures, rightness_figures, value_figures
from gradaccum.results.canvas import column as _column
from gradaccum.results.canvas import finish as _finish
from gradaccum.results.canvas import log2 as _log2
from gradaccum.results.canvas import new_axes as _axes
from gradaccum.results.canvas import png as _png
from gradaccum.results.curve import Curve
from gradaccum.results.outcome import Table

Tables = Mapping[str, Table]


def of_stage(curve: Curve, tables: Tables) -> dict[str, bytes]:
    """The figures of a stage by their file names; empty where it has none."""
    return {f"{name}.png": _png(draw(curve, tables)) for name, draw in _DRAW.get(curve.stage, {}).items()}


def worth(rows: Table) -> bytes:
    """The report's own: time to the target loss against the effective batch."""
    return _png(value_figures.worth(rows))


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
    "equivalence": {"equivalence": rightness_figures.equivalence},
    "ablation": {"ablation": rightness_figures.ablation},
    "memory": {"memory": cost_figures.memory},
    "plan": {"plan": cost_figures.plan},
    "efficiency": {"efficiency": value_figures.learning, "noise_scale": value_figures.noise_scale},
    "distributed": {"distributed": distributed},
    "scaling": {"linear_scaling": value_figures.linear_scaling, "half_life": value_figures.half_life},
}

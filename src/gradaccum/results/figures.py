"""The figures of each stage, drawn from its curve and tables, as PNG bytes.

Beside `canvas`, `cost_figures`, `rightness_figures` and `value_figures` the only user of matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from gradaccum.results import cost_figures, rightness_figures, value_figures
from gradaccum.results.canvas import column as _column
from gradaccum.results.canvas import finish as _finish
from gradaccum.results.canvas import log2 as _log2
from gradaccum.results.canvas import new_axes as _axes
from gradaccum.results.canvas import plain_log as _plain_log
from gradaccum.results.canvas import png as _png
from gradaccum.results.curve import Curve
from gradaccum.results.outcome import Table

Tables = Mapping[str, Table]


def of_stage(curve: Curve, tables: Tables) -> dict[str, bytes]:
    """The figures of a stage by their file names; empty where it has none."""
    return {f"{name}.png": _png(draw(curve, tables)) for name, draw in _DRAW.get(curve.stage, {}).items()}


def worth(rows: Table, efficiency: Mapping[str, Any], *, untimed: str | None) -> bytes:
    """The report's own: time to the target losses against the effective batch."""
    return _png(value_figures.worth(rows, efficiency, untimed=untimed))


def distributed(curve: Curve, tables: Tables) -> Figure:
    """Bytes reduced in a window, and the step time, against N, for every way over ranks."""
    del tables
    figure, (traffic, time) = _axes(2)
    series = {name: [each for each in points if "median_step_ms" in each] for name, points in curve.series().items()}
    series = {name: timed for name, timed in series.items() if timed}
    strategies = list(dict.fromkeys(name.partition("/")[0] for name in series))
    for name, timed in series.items():
        style = _style_of_way(name, strategies)
        steps = _column(timed, "accum_steps")
        traffic.plot(steps, [value / 1000 for value in _column(timed, "reduced_bytes")], label=name, **style)
        time.plot(steps, _column(timed, "median_step_ms"), label=name, **style)
        bar = {"color": style["color"], "alpha": style.get("alpha", 1.0), "linewidth": style["linewidth"]}
        reach = [(each["step_ms_low"], each["step_ms_high"]) for each in timed if each["step_ms_low"] is not None]
        if len(reach) == len(steps):
            time.vlines(steps, *zip(*reach, strict=True), **bar)
    for axes in (traffic, time):
        _log2(axes, [point["accum_steps"] for points in series.values() for point in points])
        _plain_log(axes.yaxis)
    traffic.set(ylabel="kB of gradients", title="Gradients reduced in a window")
    time.set(ylabel="ms per optimizer step (bar: 95 %)", title="Step time over ranks")
    _finish(figure, (traffic, time), "accumulation steps N")
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

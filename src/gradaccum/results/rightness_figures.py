"""Figures of what is right and what is not; matplotlib's user beside `figures`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradaccum.results.canvas import PALETTE, column, finish_with_one_legend, log2, new_axes, plain_log
from gradaccum.results.curve import Curve
from gradaccum.results.outcome import Table

Tables = Mapping[str, Table]

BLUE, RED, GREEN, PINK, ORANGE, SKY, BLACK = PALETTE

SHARP = 1e-12
"""The bound that the equivalence stage holds float64 to."""

ABOVE_START = 3
"""How many times the loss at the start the axis reaches: far above it all losses say the same."""

CONTROLS = {"control/undivided": ("X", RED), "control/mean_of_means": ("P", ORANGE)}

VARIANTS: Mapping[
    str, Mapping[str, Any]
] = {  # what runs are compared with is drawn first and broad, so that a run that coincides with it shows both
    "scaled_ragged": {"color": GREEN, "linewidth": 6, "alpha": 0.25},
    "scaled_at_n_times_lr": {"color": RED, "linewidth": 6, "alpha": 0.25},
    "scaled_clipped": {"color": "0.45", "linewidth": 3, "alpha": 0.6},
    "scaled": {"color": BLACK, "linewidth": 2},
    "naive": {"color": RED, "linestyle": "--"},
    "mean_of_means": {"color": GREEN, "linestyle": ":", "linewidth": 2},
    "step_every_micro": {"color": BLUE, "linestyle": "-."},
    "naive_clipped": {"color": PINK, "linestyle": "--"},
    "clip_every_micro": {"color": SKY, "linestyle": ":", "linewidth": 2},
}


def equivalence(curve: Curve) -> Figure:
    """Gradient differences to the full batch, in float64 and float32; 0 is exact."""
    figure, (sharp, single) = new_axes(2)
    _differences(sharp, curve, "grad_rel_diff_float64", exact=1e-17)
    _differences(single, curve, "max_grad_diff", exact=1e-10)
    sharp.axhline(SHARP, color="0.5", linestyle="--", label=f"bound {SHARP:.0e}")
    sharp.set_ylabel("gradient difference / summed magnitudes")
    single.set_ylabel("largest gradient difference")
    return finish_with_one_legend(figure, (sharp, single), "accumulation steps N")


def _differences(axes: Axes, curve: Curve, key: str, *, exact: float) -> None:
    right = [point[key] for point in curve.points if not point["series"].startswith("control/")]
    for name, points in curve.series().items():
        optimizer, _, uneven = name.partition("/")
        first = optimizer == "sgd"
        marker, color = CONTROLS.get(name, ("o" if first else "v", BLUE if first else GREEN))
        axes.plot(
            column(points, "accum_steps"),
            column(points, key),
            label=name,
            color=color,
            linestyle="none" if uneven else "-" if first else "--",
            marker=marker,
            markersize={"control": 9}.get(optimizer, 10 if uneven else 6),
            markerfacecolor="none" if uneven and name not in CONTROLS else color,
        )
    log2(axes, [point["accum_steps"] for point in curve.points])
    axes.set_yscale("symlog", linthresh=exact)
    axes.set_yticks([0.0, *(10.0**power for power in range(round(math.log10(exact)) + 1, 3, 3))])
    kind = key.removeprefix("grad_rel_diff_") if "float64" in key else "float32"
    axes.set(ylim=(-exact / 2, 100), title=f"{kind}: right cuts differ by at most {max(right, default=0):.0e}")


def ablation(curve: Curve, tables: Tables) -> Figure:
    """Training loss of every variant at the largest N, one panel an optimizer; what leaves the axis is marked there."""
    most = max(point["accum_steps"] for point in curve.points)
    optimizers = list(dict.fromkeys(point["series"].partition("/")[0] for point in curve.points))
    figure, panels = new_axes(len(optimizers))
    for axes, optimizer in zip(panels, optimizers, strict=True):
        losses = {name: _losses(tables["losses"], f"{optimizer}/{name}", most) for name in VARIANTS}
        shown = {name: values for name, values in losses.items() if values}
        _draw_losses(axes, shown)
        axes.set(ylabel="training loss (mean over targets)", title=f"{optimizer}, N={most}: {_told(shown)}")
    return finish_with_one_legend(figure, panels, "optimizer step")


def _draw_losses(axes: Axes, losses: Mapping[str, Sequence[float]]) -> None:
    top, last = ABOVE_START * losses["scaled"][0], max(map(len, losses.values()))
    for name, values in losses.items():
        axes.plot(range(1, len(values) + 1), values, label=name, **VARIANTS[name])
        mark = {"color": VARIANTS[name]["color"], "markersize": 9, "clip_on": False, "linestyle": "none"}
        for step in _leaves(values, top):
            axes.plot(step, top, marker="^", **mark)
        if len(values) < last:
            axes.plot(len(values), min(values[-1], top), marker="X", **mark)
    for marker, meaning in (("^", "leaves the axis, in its line's colour"), ("X", "diverges, in its line's colour")):
        if any(line.get_marker() == marker for line in axes.lines):
            axes.plot([], [], marker, color=BLACK, fillstyle="none", label=meaning)
    axes.set(ylim=(min(map(min, losses.values())) / 1.3, top))
    plain_log(axes.yaxis)


def _losses(rows: Table, series: str, accum_steps: int) -> list[float]:
    return [float(row["loss"]) for row in rows if (row["series"], int(row["accum_steps"])) == (series, accum_steps)]


def _leaves(losses: Sequence[float], top: float) -> list[int]:
    """The steps at which a run rises above the axis."""
    return [step for step, (before, loss) in enumerate(pairwise(losses), start=2) if before <= top < loss]


def _told(losses: Mapping[str, Sequence[float]]) -> str:
    """What became of the run whose loss is not divided."""
    right, naive = losses["scaled"], losses.get("naive", [])
    if not naive:
        return "the right loop and mistakes"
    if len(naive) < len(right):
        return f"naive diverges at step {len(naive) + 1}"
    if max(naive) > ABOVE_START * right[0]:
        return f"naive climbs to {max(naive):.0e}"
    hides = math.isclose(naive[-1], right[-1], rel_tol=0.01)
    return "naive looks right" if hides else f"naive ends at {naive[-1]:.2g}, right at {right[-1]:.2g}"

"""Figures of what a larger effective batch buys; matplotlib's user beside `figures`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

from gradaccum.results.canvas import column, finish_with_one_legend, log2, new_axes, plain, plain_log
from gradaccum.results.curve import Curve, Point
from gradaccum.results.outcome import Row, Table
from gradaccum.results.sentences import QUARTERS, RULE
from gradaccum.results.sentences import middle as noise_middle
from gradaccum.results.worth import TARGETS, targets

Tables = Mapping[str, Table]

EFFECTIVE_BATCH = "effective batch (samples)"


def learning(curve: Curve, tables: Tables) -> Figure:
    """Validation loss of every arm against samples and steps, with its interval; and what decides at the end."""
    figure, (by_samples, by_steps, above) = new_axes(3)
    arms = _arms(tables["learning"])
    failed = {str(point["effective_batch"]) for point in curve.points if point["failed_runs"]}
    for (effective_batch, rows), color in zip(arms.items(), _along(len(arms)), strict=True):
        label = f"effective batch {effective_batch}"
        style = {"color": color, "label": f"{label}: a seed failed", "linestyle": ":"}
        style = style if effective_batch in failed else {"color": color, "label": label}
        _band(by_samples, "samples", rows, **style)
        _band(by_steps, "steps", rows[1:], **style)
    start = float(tables["learning"][0]["validation_loss"])
    least = min(float(row["validation_loss"]) for row in tables["learning"] if row["validation_loss"] not in (None, ""))
    for axes, title in ((by_samples, "equal samples"), (by_steps, "equal optimizer steps")):
        axes.set(ylabel="validation loss (mean, 95 % interval)", title=f"Learning at {title}")
        axes.set_ylim(0.7 * least, 1.5 * start)
        plain_log(axes.yaxis)
    _log(by_steps.xaxis, (line.get_xdata() for line in by_steps.lines))
    for name, points in curve.series().items():
        _differences(above, points, "loss_above_reference", label=f"{name}, 95 % interval")
    plain(above.yaxis)
    _batches(above, _shown(curve.points, "loss_above_reference"))
    above.set(ylabel="loss above the smallest arm's", title="What decides: the difference, seed by seed")
    finish_with_one_legend(figure, (by_samples, by_steps, above), "samples")
    by_steps.set_xlabel("optimizer steps")
    above.set_xlabel(EFFECTIVE_BATCH)
    return figure


def noise_scale(curve: Curve, tables: Tables) -> Figure:
    """The noise scale in each quarter of training, and the loss at equal samples beside it."""
    figure, (along, bend) = new_axes(2)
    samples = max(float(row["samples"]) for row in tables["learning"])
    for share, point in zip(np.linspace(-0.25, 0.25, len(curve.points)), curve.points, strict=True):
        middles = samples * (np.arange(len(QUARTERS)) + 0.5 + share) / len(QUARTERS)
        _quarters(along, point, middles, color=_along(len(curve.points))[curve.points.index(point)])
    along.set_xticks(samples * np.linspace(0, 1, len(QUARTERS) + 1))
    _log(along.yaxis, _heights(along))
    along.set(ylabel="gradient noise scale (targets, 95 % interval)")
    along.set_title("Noise scale by quarter of training")
    for name, points in curve.series().items():
        _losses(bend, points, label=f"{name}, 95 % interval")
    middles = [middle for point in curve.points if (middle := noise_middle(point)) and math.isfinite(middle)]
    if middles:
        bend.axvspan(min(middles), max(middles), color="0.9", label="noise scale of the arms, middle of the quarters")
    _batches(bend, curve.points)
    _log(bend.yaxis, _heights(bend))
    bend.set(ylabel="validation loss at the end", title="Loss reached on equal samples")
    finish_with_one_legend(figure, (along, bend), EFFECTIVE_BATCH)
    along.set_xlabel("samples")
    return figure


def linear_scaling(curve: Curve) -> Figure:
    """Goyal et al. 2017: loss on equal samples with each way to set the learning rate."""
    return _rules(curve, "linear", "Linear scaling of the learning rate (SGD)")


def half_life(curve: Curve) -> Figure:
    """Marek et al. 2025: loss on equal samples with AdamW's second beta fixed, and with its half-life fixed."""
    return _rules(curve, "half_life", "AdamW's second moment at small batches")


def worth(rows: Table, efficiency: Mapping[str, Any], *, untimed: str | None) -> Figure:
    """What a larger batch costs a sample, what it needs in samples, and the time that makes; or why there is none."""
    figure, panels = new_axes(3)
    rate, samples, seconds = panels
    timed = [row for row in rows if row["samples_per_sec"] is not None]
    rate.plot(column(timed, "effective_batch"), column(timed, "samples_per_sec"), "o-", color="0.3", label="samples/s")
    for target, loss in targets(efficiency).items():
        label = f"to loss {loss:.3g}, {TARGETS[target]}"
        _interval(samples, rows, f"samples_to_{target}", label=label)
        _interval(seconds, rows, f"seconds_to_{target}", label=label)
    for axes, title in zip(panels, ("Samples/s", "Samples to a target loss", "Seconds to a target loss"), strict=True):
        axes.set(ylabel=title.lower(), title=title)
        plain(axes.yaxis)
        drawn = np.concatenate([[0.0], *(np.asarray(line.get_ydata(), float) for line in axes.lines)])
        axes.set_ylim(0, 1.1 * drawn.max() or 1.0)
        _batches(axes, rows)
        if drawn.max() == 0:
            why = untimed if timed == [] and axes is not samples else None
            axes.text(0.5, 0.4, fill(why or "No arm trained well.", 40), transform=axes.transAxes, ha="center")
    return finish_with_one_legend(figure, panels, EFFECTIVE_BATCH)


def _rules(curve: Curve, trial: str, title: str) -> Figure:
    """What every arm ends with, and what decides: the differences to the base, and to the rule at the same batch."""
    figure, panels = new_axes(3)
    losses, to_base, to_rule = panels
    series = {name: points for name, points in curve.series().items() if name.startswith(f"{trial}/")}
    every = [point for points in series.values() for point in points]
    deciding = {to_base: "loss_above_base", to_rule: "loss_above_rule"}
    scales = [_about_none(axes, [point[key] for point in every]) for axes, key in deciding.items()]
    for number, (name, points) in enumerate(series.items()):
        apart: dict[str, Any] = {"label": name.partition("/")[2], "shift": 1.05 ** (number - (len(series) - 1) / 2)}
        _losses(losses, points, **apart)
        _differences(to_base, points, "loss_above_base", **apart)
        _differences(to_rule, points, "loss_above_rule", **apart)
    base = next(iter(series.values()))[0]["departs_from"]
    _log(losses.yaxis, _heights(losses))
    losses.set(ylabel="validation loss at the end", title=title)
    to_base.set(
        ylabel=f"loss above that at {base}{scales[0]}", title=f"What decides: minus the base at {base}, seed by seed"
    )
    to_rule.set(
        ylabel=f"loss above {RULE[trial]}'s{scales[1]}", title=f"Minus {RULE[trial]} at the same batch, seed by seed"
    )
    for axes, key in ((losses, "validation_loss"), *deciding.items()):
        _batches(axes, _shown(every, key))
    return finish_with_one_legend(figure, panels, EFFECTIVE_BATCH)


def _losses(axes: Axes, points: Sequence[Point], *, label: str, shift: float = 1.0) -> None:
    """Means with intervals; arms in which a seed failed as crosses above all others, at no value."""
    _with_failed(axes, points, "validation_loss", label=label, shift=shift)


def _differences(axes: Axes, points: Sequence[Point], name: str, *, label: str, shift: float = 1.0) -> None:
    """Paired differences with their intervals, beside the line of none; failed arms as `_losses` draws them."""
    _with_failed(axes, points, name, label=label, shift=shift)
    axes.axhline(0, color="0.5", linestyle="--", label="no difference")


def _with_failed(axes: Axes, points: Sequence[Point], name: str, *, label: str, shift: float) -> None:
    sound = [point for point in points if not point["failed_runs"]]
    color = _interval(axes, sound, name, label=label, shift=shift)
    x = shift * np.array([point["effective_batch"] for point in points if point["failed_runs"]])
    if len(x):
        top = {"transform": axes.get_xaxis_transform(), "color": color, "clip_on": False}
        axes.plot(x, np.full(len(x), 0.96), "x", label=f"{label.partition(',')[0]}: a seed failed", **top)


def _about_none(axes: Axes, differences: Sequence[float | None]) -> str:
    """Where large differences would hide small ones, a scale that is straight around 0; gives what the label says."""
    sizes = [abs(each) for each in differences if each]
    if not sizes or max(sizes) <= 10 * min(sizes):
        plain(axes.yaxis)
        return ""
    straight = float(f"{np.median(sizes):.1g}")
    axes.set_yscale("symlog", linthresh=straight, subs=(2, 5))
    plain(axes.yaxis)
    return f" (log beyond {straight:g})"


def _log(axis: Axis, values: Iterable[Any]) -> None:
    """A logarithmic scale, where anything is drawn and all of it above 0: matplotlib has none for nothing."""
    drawn = np.concatenate([np.asarray([], float), *(np.asarray(each, float) for each in values)])
    if drawn.size and drawn.min() > 0:
        plain_log(axis)


def _heights(axes: Axes) -> Iterable[Any]:
    """Of what is drawn at a value."""
    return (line.get_ydata() for line in axes.lines if line.get_transform() == axes.transData)


def _shown(points: Sequence[Point], key: str) -> Sequence[Point]:
    """Those with a value or a cross, so that no axis begins with a place that is empty."""
    return [point for point in points if point[key] is not None or point["failed_runs"]] or points


def _batches(axes: Axes, rows: Sequence[Row]) -> None:
    """The axis of effective batches, with room for one at either end."""
    batches = [int(row["effective_batch"]) for row in rows]
    log2(axes, batches)
    axes.set_xlim(min(batches) / 1.3, 1.3 * max(batches))


def _interval(axes: Axes, rows: Sequence[Row], name: str, *, label: str, shift: float = 1.0) -> Any:
    """Values with their 95 % intervals, where there are any, shifted so that lines do not hide; gives the colour."""
    known = [row for row in rows if row[name] is not None]
    x, y, low, high = (np.array(column(known, key)) for key in ("effective_batch", name, f"{name}_low", f"{name}_high"))
    container = axes.errorbar(shift * x, y, yerr=[y - low, high - y], marker="o", capsize=3, label=label)
    return container.lines[0].get_color()


def _band(axes: Axes, x: str, rows: Sequence[Row], *, color: Any, label: str, linestyle: str = "-") -> None:
    """A mean with its interval; of a failed arm, whose line is dotted, the interval would fill the panel."""
    known = [row for row in rows if row["validation_loss"] not in (None, "")]
    at, mean, low, high = (
        [float(row[key]) for row in known]
        for key in (x, "validation_loss", "validation_loss_low", "validation_loss_high")
    )
    axes.plot(at, mean, color=color, label=label, linestyle=linestyle)
    if linestyle == "-":
        axes.fill_between(at, np.maximum(low, 1e-12), high, color=color, alpha=0.15, linewidth=0)


def _quarters(axes: Axes, point: Point, middles: Any, *, color: Any) -> None:
    """Of one arm; an arrow up where the interval has no bound."""
    known = [(at, name) for at, name in zip(middles, QUARTERS, strict=True) if point[name] is not None]
    if not known:
        return
    y, low, high = (
        np.array([math.inf if (value := point[f"{name}{end}"]) is None else value for _, name in known])
        for end in ("", "_low", "_high")
    )
    bounded = np.isfinite(high)
    reach = [y - low, np.where(bounded, high, 2 * y) - y]
    label = f"effective batch {point['effective_batch']}"
    style: dict[str, Any] = {"marker": "o", "capsize": 3, "color": color, "label": label}
    axes.errorbar([at for at, _ in known], y, yerr=reach, lolims=~bounded, **style)


def _along(count: int) -> list[Any]:
    """Colours for arms in order: from dark to light."""
    return [colormaps["viridis"](share) for share in np.linspace(0, 0.9, count)]


def _arms(rows: Table) -> dict[str, list[Row]]:
    """The rows of each arm, as written or as read from CSV."""
    arms: dict[str, list[Row]] = {}
    for row in rows:
        arms.setdefault(str(row["effective_batch"]), []).append(row)
    return arms

"""Figures of what a larger effective batch buys; matplotlib's user beside `figures`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradaccum.results.canvas import finish, log2, new_axes
from gradaccum.results.curve import Curve, Point
from gradaccum.results.outcome import Row, Table

Tables = Mapping[str, Table]


def learning(curve: Curve, tables: Tables) -> Figure:
    """Validation loss of every arm against samples, and against optimizer steps; above its start none is drawn."""
    del curve
    figure, (by_samples, by_steps) = new_axes(2)
    for effective_batch, rows in _arms(tables["learning"]):
        by_samples.plot(*_known(rows, "samples", "validation_loss"), label=effective_batch)
        by_steps.plot(*_known(rows[1:], "steps", "validation_loss"), label=effective_batch)
    start = float(tables["learning"][0]["validation_loss"])
    for axes, title in ((by_samples, "at equal samples"), (by_steps, "at equal optimizer steps")):
        axes.set(yscale="log", ylabel="validation loss (mean over seeds)", title=f"Learning curves {title}")
        axes.set_ylim(top=1.5 * start)
    by_steps.set_xscale("log")
    return _finish_by_arm(figure, (by_samples, "samples"), (by_steps, "optimizer steps"))


def noise_scale(curve: Curve, tables: Tables) -> Figure:
    """The noise scale along training, and the loss at equal samples against it; of arms that did not fail."""
    figure, (along, bend) = new_axes(2)
    sound = {str(point["effective_batch"]): point for point in curve.points if not point["failed_runs"]}
    for effective_batch, rows in _arms(tables["learning"]):
        x, y = _known(rows, "samples", "noise_scale")
        if x and effective_batch in sound:
            along.plot(x, y, label=effective_batch)
    along.set(yscale="log", ylabel="gradient noise scale (targets)", title="Noise scale along training")
    for name, points in curve.series().items():
        _losses(bend, points, label=name)
    scales = [point["noise_scale"] for point in sound.values() if point["noise_scale"]]
    if scales:
        bend.axvspan(min(scales), max(scales), color="0.85", label="noise scale of the arms")
    log2(bend, [point["effective_batch"] for point in curve.points])
    bend.set(yscale="log", ylabel="validation loss at the end", title="Loss reached on equal samples")
    _finish_by_arm(figure, (along, "samples"), (bend, "effective batch (samples)"))
    bend.legend(fontsize="small")
    return figure


def _finish_by_arm(figure: Figure, *panels: tuple[Axes, str]) -> Figure:
    finish(figure, [axes for axes, _ in panels], "")
    for axes, x_label in panels:
        axes.set_xlabel(x_label)
        axes.legend(fontsize="small", title="effective batch")
    return figure


def linear_scaling(curve: Curve, tables: Tables) -> Figure:
    """Goyal et al. 2017: loss on equal samples with each way to set the learning rate."""
    del tables
    return _rules(curve, "linear", "Linear scaling of the learning rate (SGD)")


def half_life(curve: Curve, tables: Tables) -> Figure:
    """Marek et al. 2025: loss on equal samples with AdamW's second beta fixed, and with its half-life fixed."""
    del tables
    return _rules(curve, "half_life", "AdamW's second moment at small batches")


def worth(rows: Table) -> Figure:
    """What a larger batch costs a sample, what it needs in samples, and the time that makes."""
    figure, panels = new_axes(3)
    for axes, key, title in zip(
        panels,
        ("samples_per_sec", "samples_to_target", "seconds_to_target"),
        ("Samples/s", "Samples to the target loss", "Seconds to the target loss"),
        strict=True,
    ):
        axes.plot(*_known(rows, "effective_batch", key), marker="o", label="measured")
        log2(axes, [int(row["effective_batch"]) for row in rows])
        axes.set(ylabel=title, title=title, ylim=(0, None))
    return finish(figure, panels, "effective batch (samples)")


def _rules(curve: Curve, trial: str, title: str) -> Figure:
    figure, (axes,) = new_axes(1)
    series = {name: points for name, points in curve.series().items() if name.startswith(f"{trial}/")}
    for name, points in series.items():
        _losses(axes, points, label=name.partition("/")[2])
    log2(axes, [point["effective_batch"] for points in series.values() for point in points])
    axes.set(yscale="log", ylabel="validation loss at the end", title=title)
    return finish(figure, (axes,), "effective batch (samples)")


def _losses(axes: Axes, points: Sequence[Point], *, label: str) -> None:
    """Means with intervals; arms in which a seed failed as crosses above all others, at no value."""
    sound = [point for point in points if not point["failed_runs"]]
    failed = [point for point in points if point["failed_runs"]]
    low, high = (
        [abs(point[f"validation_loss_{end}"] - point["validation_loss"]) for point in sound] for end in ("low", "high")
    )
    x, y = ([point[key] for point in sound] for key in ("effective_batch", "validation_loss"))
    (line, *_) = axes.errorbar(x, y, yerr=[low, high], marker="o", capsize=3, label=label)
    top = max([2 * point["validation_loss"] for point in sound], default=1.0)
    axes.plot(
        [point["effective_batch"] for point in failed],
        [top for _ in failed],
        marker="x",
        linestyle="none",
        color=line.get_color(),
        label=f"{label}: a seed failed" if failed else None,
    )


def _arms(rows: Table) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each arm, as written or as read from CSV."""
    for effective_batch in dict.fromkeys(str(row["effective_batch"]) for row in rows):
        yield effective_batch, [row for row in rows if str(row["effective_batch"]) == effective_batch]


def _known(rows: Table, x: str, y: str) -> tuple[list[float], list[float]]:
    """Both columns, where the second has a value."""
    known: list[Any] = [row for row in rows if row[y] not in (None, "")]
    return [float(row[x]) for row in known], [float(row[y]) for row in known]

"""What the figures of the efficiency and scaling stages and of the report draw, read off their axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.markers import CARETUPBASE

from gradaccum.results import figures, value_figures
from gradaccum.results.canvas import png
from gradaccum.results.curve import Curve
from gradaccum.results.worth import why_untimed, worth_table
from tests.results.made_up_metrics import ARM, EFFICIENCY, RULED, between, by_quarter
from tests.results.test_worth import point, trained

NONE = (None, None, None)


def scaling(**changes: Any) -> Curve:
    base = {**ARM, **RULED, **between("loss_above_base", NONE), **between("loss_above_rule", NONE)}
    arms = [
        point(16, **{**base, "series": "half_life/fixed", "departs_from": 64}),
        point(1, **{**ARM, **RULED, "series": "half_life/fixed", "departs_from": 64}),
        point(1, **{**ARM, **RULED, "series": "half_life/half_life", "departs_from": 64, **changes}),
    ]
    return Curve("scaling", "effective_batch", tuple(arms))


def drawn(axes: Axes) -> list[tuple[float, float]]:
    """All values with error bars, as y and half the height of the bar."""
    found: list[tuple[float, float]] = []
    for container in axes.containers:
        assert isinstance(container, ErrorbarContainer)
        heights = [(ends[1][1] - ends[0][1]) / 2 for ends in container.lines[2][0].get_segments()]
        found += zip(container.lines[0].get_ydata(), heights, strict=True)
    return found


def all_inside(figure: Figure) -> bool:
    """No point lies outside its axes."""
    return all(
        axes.get_ylim()[0] <= y <= axes.get_ylim()[1] for axes in figure.axes for y, _ in drawn(axes) if np.isfinite(y)
    )


def test_what_decides_a_published_rule_is_drawn_with_its_interval() -> None:
    figure = value_figures.half_life(scaling(**between("loss_above_rule", NONE)))
    losses, to_base, to_rule = figure.axes
    assert len(drawn(losses)) == 3
    assert drawn(to_base) == [(0.1, pytest.approx(0.05))] * 2
    assert drawn(to_rule) == [(0.01, pytest.approx(0.06))]
    assert "minus the base at 64, seed by seed" in to_base.get_title()
    assert all_inside(figure)


def test_arms_do_not_hide_each_other() -> None:
    losses = value_figures.half_life(scaling()).axes[0]
    fixed, kept = (container.lines[0].get_xdata()[0] for container in losses.containers)
    assert fixed != kept
    assert fixed == pytest.approx(kept, rel=0.1)


def test_a_failed_arm_is_a_cross_at_the_top_without_a_value() -> None:
    failed = {**ARM, **between("loss_above_reference", (1e32, -1e33, 1e33)), "failed_runs": 1}
    arms = (point(1, **ARM), point(2, **failed))
    stand = {"samples": "64", "steps": "8", **between("validation_loss", ("0.5", "0.4", "0.6"))}
    rows = [{"effective_batch": "4", **stand}, {"effective_batch": "8", **stand}]
    by_samples, _, above = value_figures.learning(Curve("efficiency", "effective_batch", arms), {"learning": rows}).axes
    assert drawn(above) == [(0.02, pytest.approx(0.03))]
    (cross,) = [line for line in above.lines if line.get_marker() == "x"]
    assert list(cross.get_xdata()) == [8]
    assert above.get_ylim()[1] < 1
    assert [len(by_samples.collections), by_samples.lines[1].get_label()] == [1, "effective batch 8: a seed failed"]


def test_axes_are_written_as_people_write_numbers_and_begin_where_something_is() -> None:
    figure = value_figures.half_life(scaling())
    assert not any("10^" in label.get_text() for axes in figure.axes for label in axes.get_yticklabels())
    assert [len(axes.get_xticks()) for axes in figure.axes] == [2, 1, 1]


def test_an_axis_that_is_logarithmic_beyond_a_value_says_so() -> None:
    figure = value_figures.half_life(scaling(**between("loss_above_base", (5.0, 4.0, 6.0))))
    assert [axes.get_ylabel().partition(" (")[2] for axes in figure.axes] == ["", "log beyond 3)", ""]
    assert [axes.get_yscale() == "symlog" for axes in figure.axes] == [False, True, False]


def worth_of(throughput_micro_batch: int) -> tuple[Figure, str | None]:
    efficiency = Curve("efficiency", "effective_batch", (trained(1, 100.0), trained(2, 100.5)))
    times = [point(n, samples_per_sec=10.0 * n, micro_batch=throughput_micro_batch) for n in (1, 2)]
    throughput = Curve("throughput", "effective_batch", tuple(times))
    untimed = why_untimed(efficiency, throughput)
    return value_figures.worth(worth_table(efficiency, throughput), EFFICIENCY, untimed=untimed), untimed


def test_every_panel_of_worth_holds_all_of_its_points() -> None:
    figure, _ = worth_of(4)
    assert [len(drawn(axes)) for axes in figure.axes] == [0, 4, 4]
    assert all(axes.get_ylim()[1] > max(y for line in axes.lines for y in line.get_ydata()) for axes in figure.axes)
    assert not any(axes.texts for axes in figure.axes)


def test_a_panel_without_times_says_why_and_what_to_set() -> None:
    figure, untimed = worth_of(8)
    told = [" ".join(" ".join(text.get_text().split()) for text in axes.texts) for axes in figure.axes]
    assert told == [untimed, "", untimed]
    assert "Set throughput.micro_batch to 4" in str(untimed)
    assert len(drawn(figure.axes[1])) == 4


def test_the_noise_scale_is_drawn_by_quarter_with_an_arrow_where_it_has_no_bound() -> None:
    quarters = [(10.0, 5.0, 20.0), (20.0, 10.0, 40.0), (30.0, 20.0, 45.0), (60.0, 40.0, None)]
    arms = tuple(point(n, **{**ARM, **by_quarter(quarters)}) for n in (2, 4))
    rows = [{"effective_batch": "8", "samples": samples} for samples in ("0", "64")]
    along, bend = value_figures.noise_scale(Curve("efficiency", "effective_batch", arms), {"learning": rows}).axes
    assert [y for y, _ in drawn(along)] == [10.0, 20.0, 30.0, 60.0] * 2
    arrows = [line for line in along.lines if line.get_marker() == CARETUPBASE]
    assert sum(len(line.get_xdata()) for line in arrows) == 2
    assert not along.get_legend()
    assert not bend.get_legend()


@pytest.mark.parametrize("changes", [between("validation_loss", NONE) | {"failed_runs": 3}])
def test_figures_of_arms_that_all_failed_are_drawn_all_the_same(changes: dict[str, Any]) -> None:
    gone = {**ARM, **RULED, **changes, **by_quarter([NONE] * 4), **between("loss_above_reference", NONE)}
    gone |= between("loss_above_base", NONE) | between("loss_above_rule", NONE)
    gone |= between("samples_to_target", NONE) | between("samples_to_common_target", NONE)
    efficiency = Curve("efficiency", "effective_batch", tuple(point(n, **gone) for n in (1, 2)))
    ended = {"effective_batch": "4", "samples": "0", "steps": "0", **between("validation_loss", ("2.3", "2.2", "2.4"))}
    lost = {**ended, "samples": "64", "steps": "8", **between("validation_loss", ("", "", ""))}
    for name, image in figures.of_stage(efficiency, {"learning": [ended, lost]}).items():
        assert image, name
    every = [point(n, **{**gone, "series": f"half_life/{name}"}) for name in ("fixed", "half_life") for n in (1, 2)]
    assert png(value_figures.half_life(Curve("scaling", "effective_batch", tuple(every))))
    metrics = EFFICIENCY | {"target_loss": None, "common_target_loss": None}
    figure = value_figures.worth(worth_table(efficiency, efficiency_timed()), metrics, untimed=None)
    assert png(figure)
    assert [bool(axes.texts) for axes in figure.axes] == [False, True, True]


def efficiency_timed() -> Curve:
    return Curve("throughput", "effective_batch", tuple(point(n, samples_per_sec=10.0) for n in (1, 2)))

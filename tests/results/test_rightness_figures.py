from __future__ import annotations

from collections.abc import Sequence

import pytest
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from gradaccum.results.curve import Curve
from gradaccum.results.outcome import Row
from gradaccum.results.rightness_figures import ablation, equivalence
from tests.results.made_up_metrics import DIFFS, MISTAKE, point

CUTS = ("sgd", "sgd/uneven", "adamw", "adamw/uneven", "control/undivided", "control/mean_of_means")


def lines(axes: Axes) -> dict[str, Line2D]:
    return {str(line.get_label()): line for line in axes.lines}


def losses(**runs: Sequence[float]) -> list[Row]:
    return [
        {"series": f"sgd/{name}", "accum_steps": "8", "step": str(step), "loss": str(loss)}
        for name, values in runs.items()
        for step, loss in enumerate(values, start=1)
    ]


def panel(**runs: Sequence[float]) -> Axes:
    curve = Curve("ablation", "accum_steps", tuple(point(f"sgd/{name}", 8, **MISTAKE) for name in runs))
    (axes,) = ablation(curve, {"losses": losses(**runs)}).axes
    return axes


def test_every_series_of_the_equivalence_looks_like_no_other() -> None:
    curve = Curve("equivalence", "accum_steps", tuple(point(name, 2, **DIFFS) for name in CUTS))
    for axes in equivalence(curve).axes:
        looks = {
            (str(line.get_marker()), str(line.get_color()), str(line.get_markerfacecolor()))
            for name, line in lines(axes).items()
            if name in CUTS
        }
        assert len(looks) == len(CUTS)


def test_the_legend_lies_outside_every_panel() -> None:
    curve = Curve("equivalence", "accum_steps", tuple(point(name, 2, **DIFFS) for name in CUTS))
    figure = equivalence(curve)
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {*CUTS, "bound 1e-12"}
    assert all(axes.get_legend() is None for axes in figure.axes)


def test_a_loss_that_explodes_flattens_no_other_curve() -> None:
    axes = panel(scaled=[2.0, 1.0, 0.5], naive=[2.0, 1e11, 4.0])
    assert axes.get_ylim()[1] == pytest.approx(6)
    assert axes.get_title() == "sgd, N=8: naive climbs to 1e+11"
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines if line.get_marker() == "^"] == [  # type: ignore[arg-type]
        ([2], [6.0]),
        ([], []),  # what the legend shows
    ]


def test_a_run_that_diverges_is_marked_where_it_ends() -> None:
    axes = panel(scaled=[2.0, 1.0, 0.5], naive=[2.0, 3.0])
    assert axes.get_title() == "sgd, N=8: naive diverges at step 3"
    assert [list(line.get_xdata()) for line in axes.lines if line.get_marker() == "X"] == [[2], []]  # type: ignore[arg-type]


def test_a_run_stays_visible_upon_the_one_it_coincides_with() -> None:
    same = [2.0, 9.0, 3.0]
    drawn = lines(panel(scaled=[2.0, 1.0, 0.5], naive=same, scaled_at_n_times_lr=same))
    names = list(drawn)
    assert names.index("scaled_at_n_times_lr") < names.index("naive")
    assert drawn["scaled_at_n_times_lr"].get_linewidth() > 2 * drawn["naive"].get_linewidth()


@pytest.mark.parametrize(
    ("naive", "told"), [([2.0, 0.501], "naive looks right"), ([2.0, 1.0], "naive ends at 1, right at 0.5")]
)
def test_the_title_says_what_became_of_the_naive_loop(naive: list[float], told: str) -> None:
    assert panel(scaled=[2.0, 0.5], naive=naive).get_title().endswith(told)

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from gradaccum.results import cost_figures
from gradaccum.results.curve import Curve, Point

MIB = 2**20
KINDS = tuple(cost_figures.MEMORY_KINDS)


def throughput(*, interval: bool = True) -> Figure:
    def ends(ms: float) -> dict[str, float | None]:
        return {"step_ms_low": 0.9 * ms if interval else None, "step_ms_high": 1.1 * ms if interval else None}

    points = tuple(
        {"series": "sgd", "effective_batch": 4 * n, "accum_steps": n, "median_step_ms": 2.0 * n + 1, **ends(2 * n + 1)}
        | {"fitted_step_ms": 2.0 * n + 1, "step_share": 1 / (2 * n + 1), "micro_batch": 4, "world_size": 1}
        for n in (1, 4, 16)
    )
    rows = [
        {"effective_batch": "8", "micro_batch": m, "median_step_ms": t, **ends(t)} for m, t in (("1", 9.5), ("8", 1.5))
    ]
    return cost_figures.throughput(Curve("throughput", "effective_batch", points), {"frontier": rows})


def memory(**seen: int | None) -> Figure:
    def point(micro: int, steps: int) -> Point:
        size = {"predicted_bytes": 6 * micro * MIB, "tally_bytes": 6 * micro * MIB} | dict.fromkeys(BYTES, micro * MIB)
        common: Point = {"series": f"adamw/micro_batch={micro}", "micro_batch": micro, "accum_steps": steps}
        return (
            common | size | {"effective_batch": 1, "world_size": 1, "process_bytes": None, "device_bytes": None} | seen
        )

    points = tuple(point(micro, steps) for micro in (1, 8) for steps in (1, 2))
    return cost_figures.memory(Curve("memory", "accum_steps", points))


BYTES = [f"{kind}_bytes" for kind in KINDS]


def plan(*, fits: bool = True, timed: bool = True) -> Figure:
    points = tuple(
        {"series": "candidates", "effective_batch": 8, "accum_steps": 8 // micro, "micro_batch": micro, "world_size": 1}
        | {"predicted_bytes": micro * MIB, "predicted_step_ms": 9.0 / micro if timed else None}
        | {"fits": fits or micro < 8, "chosen": micro == 2}
        for micro in (8, 2, 1)
    )
    return cost_figures.plan(Curve("plan", "accum_steps", points))


def legend(axes: Axes) -> list[str]:
    shown = axes.get_legend()
    assert shown is not None
    return [text.get_text() for text in shown.get_texts()]


def data_of(axes: Axes, line: int = 0) -> list[float]:
    data: list[float] = list(axes.lines[line].get_ydata())
    return data


@pytest.mark.parametrize(
    "figure", [throughput(), throughput(interval=False), memory(), memory(process_bytes=7 * MIB), plan()]
)
def test_no_legend_hides_a_point(figure: Figure) -> None:
    figure.canvas.draw()
    for axes in figure.axes:
        shown = axes.get_legend()
        assert shown is not None
        box = shown.get_window_extent()
        for line in axes.lines:
            at: Any = axes.transData.transform([(x, y) for x, y in zip(*line.get_data(), strict=True)])
            assert not any(box.contains(*point) for point in at)


def test_samples_a_second_are_drawn_over_their_fit_with_where_they_flatten() -> None:
    rate, time, _ = throughput().axes
    assert legend(rate) == ["within 5 % of the asymptote, 2 000", "fit", "median, 95 % interval"]
    assert legend(time) == ["fit: N x t_micro + t_step", "median, 95 % interval"]
    assert data_of(rate) == pytest.approx([1000 * 4 * n / (2 * n + 1) for n in (1, 4, 16)])
    assert data_of(time) == [3, 9, 33]


def test_memory_is_drawn_in_mib_and_adds_up_to_the_whole() -> None:
    kinds, peaks = memory(process_bytes=7 * MIB).axes
    assert peaks.get_ylabel() == "MiB"
    assert data_of(peaks) == [48, 48]
    assert legend(peaks) == [
        "predicted, micro-batch 8",
        "predicted, micro-batch 1",
        "tallied on real tensors",
        "seen by the system",
    ]
    bars = [each for each in kinds.patches if each.get_x() < 0]  # type: ignore[attr-defined]
    ends = [(each.get_y(), each.get_y() + each.get_height()) for each in bars]  # type: ignore[attr-defined]
    assert [top for _, top in ends][-1] == pytest.approx(100)
    assert all(below[1] == pytest.approx(above[0]) for below, above in pairwise(ends))
    assert legend(kinds) == [kind.replace("_", " ") for kind in reversed(KINDS)]


def test_kinds_of_memory_differ_without_colours_from_those_that_they_touch() -> None:
    assert all(one != other for one, other in pairwise(cost_figures.MEMORY_KINDS.values()))


def test_a_plan_s_ways_lie_at_their_memory_and_time() -> None:
    (axes,) = plan(fits=False).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted memory (MiB)", "ms per optimizer step")
    assert list(axes.lines[0].get_xdata()) == [8, 2, 1]
    assert data_of(axes) == [9 / 8, 4.5, 9]
    assert legend(axes) == ["fits", "does not fit", "proposed"]
    assert [text.get_text() for text in axes.texts] == ["8 x 1", "2 x 4", "1 x 8"]


def test_a_plan_without_times_lies_at_its_accumulation_steps() -> None:
    (axes,) = plan(timed=False).axes
    assert axes.get_ylabel() == "accumulation steps N"
    assert data_of(axes) == [1, 4, 8]
    assert legend(axes) == ["fits", "proposed"]


def test_a_bar_looks_like_the_way_over_ranks_that_it_belongs_to() -> None:
    times = {"reduced_bytes": 1000, "median_step_ms": 2.0, "step_ms_low": 1.8, "step_ms_high": 2.2}
    ways = [f"{strategy}/{sync}" for strategy in ("ddp", "fsdp2") for sync in ("last", "every")]
    points = tuple(
        {"series": way, "effective_batch": 4 * n, "accum_steps": n, "micro_batch": 4, "world_size": 1, **times}
        for way in ways
        for n in (1, 4)
    )
    time = cost_figures.distributed(Curve("distributed", "accum_steps", points)).axes[1]
    lines, bars = time.get_lines(), time.collections
    looks = [to_rgba(line.get_color(), line.get_alpha()) for line in lines]
    assert [tuple(bar.get_colors()[0]) for bar in bars] == looks
    assert len(set(looks)) == len(ways)

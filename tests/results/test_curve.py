from __future__ import annotations

from typing import Any

import pytest

from gradaccum.results.curve import Curve, CurveError, outer_join


def point(steps: int, **fields: Any) -> dict[str, Any]:
    return {
        "series": "s",
        "effective_batch": 4 * steps,
        "accum_steps": steps,
        "micro_batch": 4,
        "world_size": 1,
        **fields,
    }


def test_a_curve_survives_json() -> None:
    curve = Curve("throughput", "effective_batch", (point(1, loss=0.5), point(2, loss=None)))
    assert Curve.from_json(curve.to_json()) == curve


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ({key: value for key, value in point(1).items() if key != "world_size"}, "lacks world_size"),
        (point(1, loss=float("nan")), "loss=nan"),
        (point(1, micro_batch=None), "neither a micro_batch nor a cut"),
    ],
)
def test_a_point_that_breaks_the_schema_is_refused(broken: dict[str, Any], told: str) -> None:
    with pytest.raises(CurveError, match=told):
        Curve("throughput", "effective_batch", (point(2), broken))


def test_another_axis_or_schema_is_refused() -> None:
    with pytest.raises(CurveError, match="no axis"):
        Curve("throughput", "time", ())  # type: ignore[arg-type]
    with pytest.raises(CurveError, match="another kind of file"):
        Curve.from_json({"schema": "accum-curve.v2"})


def test_an_uneven_cut_has_its_sizes_and_no_micro_batch() -> None:
    curve = Curve("equivalence", "accum_steps", (point(2, micro_batch=None, cut=[5, 3]),))
    assert [(each["micro_batch"], each["cut"]) for each in curve.points] == [(None, [5, 3])]


def test_series_are_told_apart_and_run_along_x() -> None:
    curve = Curve("x", "accum_steps", (point(4), point(1), point(2, series="t")))
    assert {name: [each["accum_steps"] for each in line] for name, line in curve.series().items()} == {
        "s": [1, 4],
        "t": [2],
    }


def test_the_join_keeps_every_point_of_both_sides() -> None:
    main = Curve("throughput", "effective_batch", (point(1, samples_per_sec=10.0), point(2, samples_per_sec=15.0)))
    joined = outer_join(main, {"ablation": [point(2, final_loss=0.1), point(8, final_loss=0.2)]})
    by_steps = {each["accum_steps"]: each for each in joined.points}
    assert sorted(by_steps) == [1, 2, 8]
    assert "ablation/final_loss" not in by_steps[1]
    assert by_steps[2]["samples_per_sec"] == 15.0
    assert by_steps[2]["ablation/final_loss"] == 0.1
    assert by_steps[8]["series"] == "ablation"
    assert "samples_per_sec" not in by_steps[8]

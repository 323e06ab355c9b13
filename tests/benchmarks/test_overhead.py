from __future__ import annotations

import pytest

from benchmarks import noise_scale, overhead
from benchmarks.loops import bare, engine
from benchmarks.timing import Timing, interleave
from gradaccum.workloads.choice import WorkloadChoice


def test_runs_are_timed_in_turn_and_warmed_up_first() -> None:
    order: list[str] = []
    found = interleave({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, windows=4, rounds=3)
    assert order == [*"ab", *"ba", *"ab", *"ba", *"ab"]
    assert {name: len(timing.rounds_us) for name, timing in found.items()} == {"a": 3, "b": 3}


def test_a_loop_may_leave_its_start_up_out() -> None:
    assert interleave({"a": lambda: 3.0}, windows=2, rounds=1)["a"].rounds_us == (1.5e6,)


def test_ratios_are_taken_round_by_round() -> None:
    """A round that is slow for both sides changes no ratio."""
    ratio = Timing((10.0, 1000.0, 12.0)).over(Timing((20.0, 2000.0, 20.0)))
    assert ratio.median == 0.5
    assert f"{ratio:.2f}" == "0.50 (0.50 to 0.60)"


def test_the_noise_scale_s_row_says_what_observing_costs() -> None:
    cells = [cell.strip() for cell in noise_scale.row(WorkloadChoice("digits").load(), 2, rounds=2).split("|")]
    assert cells[1:4] == ["digits", "2", "6"]
    assert all(float(cell.split()[0]) > 0 for cell in cells[4:7])


@pytest.mark.parametrize("make", [overhead.tiny_mlp, overhead.transformer])
def test_the_page_has_a_row_for_every_number_of_accumulation_steps(make: object) -> None:
    loops = {"engine": (engine, True), "bare": (bare, False)}
    results = {n: overhead.timings(make, n, loops, budget=1, rounds=1) for n in (1, 2)}
    lines = overhead.page({"A model": results}).splitlines()
    assert "| N | engine, us | engine / bare |" in lines
    assert [line.split("|")[1].strip() for line in lines if line.startswith(("| 1", "| 2"))] == ["1", "2"]

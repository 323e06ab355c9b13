from __future__ import annotations

from typing import Any

import pytest

from gradaccum.results.claims import Claim, claims
from tests.results.test_report import EFFICIENCY, SCALING


def judged(paper: str, **changes: Any) -> Claim:
    (found,) = (
        claim for claim in claims({**EFFICIENCY, **changes}, {**SCALING, **changes}) if claim.paper.startswith(paper)
    )
    return found


@pytest.mark.parametrize(
    ("unscaled", "no_warm_up", "warm_up", "verdict"),
    [(1, 2, 4, "holds"), (1, 4, 4, "in part"), (4, 4, 4, "not shown"), (4, 4, 2, "not shown")],
)
def test_linear_scaling_is_judged_by_how_far_each_way_reaches(
    unscaled: int, no_warm_up: int, warm_up: int, verdict: str
) -> None:
    reach = {"unscaled": unscaled, "no_warm_up": no_warm_up, "warm_up": warm_up}
    changes = {f"linear/{name}/holds_up_to_times": times for name, times in reach.items()}
    found = judged("Goyal", **changes, **{"linear/holds": verdict == "holds"})
    assert found.verdict == verdict
    assert f"up to {warm_up} times that with warm-up, {no_warm_up} times without" in found.here
    assert ("does not show" in found.here) is (verdict != "holds")


@pytest.mark.parametrize(
    ("bend", "failed", "verdict"),
    [(256, 0, "holds"), (4096, 0, "not shown"), (2, 0, "not shown"), (256, 1, "cannot tell"), (None, 0, "cannot tell")],
)
def test_the_bend_is_compared_with_the_noise_scale(bend: int | None, failed: int, verdict: str) -> None:
    found = judged("McCandlish", worse_from_effective_batch=bend, worse_from_failed_runs=failed)
    assert found.verdict == verdict


def test_no_noise_scale_is_no_evidence() -> None:
    assert judged("McCandlish", noise_scale=None).verdict == "cannot tell"


@pytest.mark.parametrize(("holds", "verdict"), [(True, "holds"), (False, "not shown")])
def test_half_life_shows_both_differences_with_their_intervals(holds: bool, verdict: str) -> None:
    found = judged("Marek", **{"half_life/holds": holds})
    assert found.verdict == verdict
    assert "(-0.05 to +0.03)" in found.here
    assert "(+0.01 to +0.03)" in found.here


def test_a_diverged_seed_is_told() -> None:
    found = judged("Marek", **{"half_life/loss_above_base": None, "half_life/holds": False})
    assert (found.here, found.verdict) == ("A seed diverged.", "not shown")

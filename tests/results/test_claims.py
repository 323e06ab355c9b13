from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gradaccum.config import read_params
from gradaccum.results import sentences
from gradaccum.results.claims import Claim, claims
from tests.results.made_up_metrics import EFFICIENCY, SCALING, against, by_quarter

WORSE, EITHER, BETTER = (0.2, 0.1, 0.3), (0.05, -0.1, 0.2), (-0.2, -0.3, -0.1)


def judged(paper: str, *, arms: Sequence[int] = (4, 8, 16, 32, 64, 128, 256), **changes: Any) -> Claim:
    every = claims({**EFFICIENCY, **changes}, {**SCALING, **changes}, arms)
    (found,) = (claim for claim in every if claim.paper.startswith(paper))
    return found


@pytest.mark.parametrize(
    ("warm_up", "no_warm_up", "unscaled", "verdict", "remark"),
    [
        (EITHER, WORSE, WORSE, "holds", ""),
        (BETTER, WORSE, WORSE, "holds", ""),
        (EITHER, EITHER, WORSE, "in part", " This size does not show that warm-up helps."),
        (EITHER, BETTER, WORSE, "in part", " This size does not show that warm-up helps."),
        (EITHER, WORSE, EITHER, "in part", " This size does not show that scaling helps."),
        (WORSE, WORSE, WORSE, "in part", " This size does not show that the small batch's result is kept."),
        (EITHER, EITHER, EITHER, "not shown", " This size does not show that scaling helps, nor that warm-up helps."),
        (WORSE, BETTER, BETTER, "not shown", " is kept, nor that scaling helps, nor that warm-up helps."),
    ],
)
def test_linear_scaling_is_judged_by_the_differences_between_its_ways(
    warm_up: Any, no_warm_up: Any, *, unscaled: Any, verdict: str, remark: str
) -> None:
    ways = {"warm_up": warm_up, "no_warm_up": no_warm_up, "unscaled": unscaled}
    changes = {key: value for name, above in ways.items() for key, value in against(f"linear/{name}", above).items()}
    found = judged("Goyal", **changes)
    assert found.verdict == verdict
    assert found.here.endswith(remark)
    assert ("does not show" in found.here) is bool(remark)


def test_linear_scaling_that_fails_after_its_warm_up_is_not_shown_by_arms_that_did_not_fail() -> None:
    found = judged("Goyal", **against("linear/warm_up", EITHER, failed=1))
    assert found.verdict == "not shown"
    assert "with warm-up it failed with 1 of 3 seeds" in found.here


def test_linear_scaling_cannot_be_told_from_a_base_that_failed() -> None:
    found = judged("Goyal", **{"linear/base_failed_runs": 3})
    assert found.verdict == "cannot tell"
    assert found.here == sentences.linear_scaling({**SCALING, "linear/base_failed_runs": 3})


@pytest.mark.parametrize(
    ("bend", "failed", "verdict", "told"),
    [
        (64, 0, "holds", "64 is 2.1 times the middle of these, 30."),
        (16, 0, "holds", "16 is 0.53 times the middle of these, 30."),
        (128, 0, "not shown", "128 is 4.3 times the middle of these, 30."),
        (8, 0, "not shown", "8 is 0.27 times the middle of these, 30."),
        (64, 1, "cannot tell", "It was the learning rate that was too large there"),
        (
            None,
            0,
            "not shown",
            "Quality would be lost from 10 to 90, within 3 times the middle of these; 256 lies beyond",
        ),
    ],
)
def test_the_bend_is_compared_with_the_middle_of_a_noise_scale_that_drifts(
    bend: int | None, failed: int, verdict: str, *, told: str
) -> None:
    drifting = by_quarter([(10.0, 8.0, 12.0), (20.0, 15.0, 25.0), (40.0, 30.0, 60.0), (200.0, 100.0, None)])
    found = judged("McCandlish", **drifting, worse_from_effective_batch=bend, worse_from_failed_runs=failed)
    assert found.verdict == verdict
    assert told in found.here
    assert "it drifts" in found.here


@pytest.mark.parametrize(
    ("arms", "bend", "verdict", "told"),
    [
        ((4, 16, 64), 64, "cannot tell", "but so is every arm that could lose quality, from 10 to 90"),
        ((4, 16, 64), 16, "cannot tell", "but so is every arm that could lose quality"),
        ((4, 16, 64), None, "cannot tell", "No arm was large enough to lose quality: the largest lies below 90."),
        ((64, 16, 8, 4), 64, "holds", "64 is 2.1 times"),
        ((4, 16, 128), 16, "holds", "16 is 0.53 times"),
        ((4, 16, 128), None, "not shown", "128 lies beyond, and lost none."),
    ],
)
def test_only_arms_that_could_have_lost_quality_elsewhere_show_where_the_bend_is(
    arms: Sequence[int], bend: int | None, *, verdict: str, told: str
) -> None:
    found = judged("McCandlish", arms=arms, worse_from_effective_batch=bend)
    assert found.verdict == verdict
    assert told in found.here


@pytest.mark.parametrize("times", [1, 2, 4, 8, 16, 32])
def test_with_the_arms_of_params_the_bend_can_hold_and_can_fail_whatever_the_noise_scale(times: int) -> None:
    efficiency = read_params()["efficiency"]
    arms = [efficiency["micro_batch"] * steps for steps in efficiency["accum_steps"]]
    scale = by_quarter([(8.0 * times, 7.0 * times, 9.0 * times)] * 4)
    verdicts = {
        judged("McCandlish", arms=arms, **scale, worse_from_effective_batch=bend).verdict for bend in [*arms[1:], None]
    }
    assert {"holds", "not shown"} <= verdicts


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (by_quarter([(None, None, None)] * 4), "No noise scale could be told."),
        (by_quarter([(30.0, 20.0, 45.0), *[(None, 20.0, None)] * 3]), "In half of training no gradient stands out"),
        ({"reference_validation_loss": None}, "Every arm failed with some seed"),
        ({"reference_validation_loss": 2.29}, "Training hardly moved"),
    ],
)
def test_no_noise_scale_is_no_evidence(changes: dict[str, Any], told: str) -> None:
    found = judged("McCandlish", **changes)
    assert found.verdict == "cannot tell"
    assert told in found.here


@pytest.mark.parametrize(
    ("kept", "fixed", "verdict"),
    [
        (EITHER, WORSE, "holds"),
        (BETTER, WORSE, "holds"),
        (WORSE, WORSE, "in part"),
        (EITHER, EITHER, "not shown"),
        (WORSE, EITHER, "not shown"),
    ],
)
def test_half_life_is_judged_by_both_of_its_differences(kept: Any, fixed: Any, verdict: str) -> None:
    changes = against("half_life/kept", kept) | against("half_life/fixed", fixed)
    found = judged("Marek", **changes)
    assert found.verdict == verdict
    assert found.here == sentences.half_life({**SCALING, **changes})


@pytest.mark.parametrize("kept", [EITHER, BETTER, WORSE])
@pytest.mark.parametrize("fixed", [EITHER, WORSE])
def test_a_base_that_twice_the_learning_rate_serves_better_shows_no_rule(kept: Any, fixed: Any) -> None:
    arms = against("half_life/kept", kept) | against("half_life/fixed", fixed)
    found = judged("Marek", **arms, **against("half_life/twice_lr", BETTER))
    assert found.verdict == "cannot tell"
    assert "But at twice its learning rate 64 ends with a loss 0.2 (0.1 to 0.3) below this" in found.here
    assert judged("Marek", **arms, **against("half_life/twice_lr", WORSE)).verdict != "cannot tell"


@pytest.mark.parametrize(("failed", "verdict"), [("kept", "not shown"), ("fixed", "holds"), ("base", "cannot tell")])
def test_arms_that_failed_show_no_rule(failed: str, verdict: str) -> None:
    changes = (
        {"half_life/base_failed_runs": 1} if failed == "base" else against(f"half_life/{failed}", EITHER, failed=1)
    )
    assert judged("Marek", **changes).verdict == verdict

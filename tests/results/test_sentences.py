"""What is said of a difference is what its interval shows, whatever its sign."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gradaccum.results import sentences
from gradaccum.results.intervals import Interval
from gradaccum.results.sentences import QUARTERS
from tests.results.made_up_metrics import EFFICIENCY, SCALING, between, by_quarter

ABOVE, BELOW, EITHER = (0.2, 0.1, 0.3), (-0.2, -0.3, -0.1), (0.05, -0.1, 0.2)


@pytest.mark.parametrize(
    ("difference", "said"),
    [
        (ABOVE, "0.2 (0.1 to 0.3) above that"),
        (BELOW, "0.2 (0.1 to 0.3) below that"),
        (EITHER, "not told apart from that (-0.1 to +0.2)"),
        ((-0.05, -0.2, 0.1), "not told apart from that (-0.2 to +0.1)"),
        ((0.0, 0.0, 0.0), "not told apart from that (+0 to +0)"),
    ],
)
def test_a_difference_is_above_or_below_only_if_all_of_its_interval_is(
    difference: tuple[float, float, float], said: str
) -> None:
    assert sentences.compared(Interval(*difference), "that") == said


KEPT = {
    ABOVE: "kept ends with a loss 0.2 (0.1 to 0.3) above that at 64;",
    BELOW: "kept ends with a loss 0.2 (0.1 to 0.3) below that at 64;",
    EITHER: "kept ends with a loss not told apart from that at 64 (-0.1 to +0.2), so up to 67% more is possible;",
}
FIXED = {
    ABOVE: "with beta2 fixed it ends with a loss 0.2 (0.1 to 0.3) above that with the half-life kept.",
    BELOW: "with beta2 fixed it ends with a loss 0.2 (0.1 to 0.3) below that with the half-life kept.",
    EITHER: "with beta2 fixed it ends with a loss not told apart from that with the half-life kept (-0.1 to +0.2), "
    "so up to 67% more is possible.",
}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("fixed", FIXED)
def test_both_differences_of_the_half_life_rule_are_told(kept: Any, fixed: Any) -> None:
    said = sentences.half_life(
        SCALING | between("half_life/kept_loss_above", kept) | between("half_life/fixed_loss_above", fixed)
    )
    told = f"{KEPT[kept]} {FIXED[fixed]} {sentences.SQRT}"
    assert said == f"At effective batch 4, AdamW with its second moment's half-life {told}"


NONE = (None, None, None)


@pytest.mark.parametrize(
    ("failed", "said"),
    [
        ("base", "Effective batch 64, from which the half-life rule departs, failed with 2 of 3 seeds: lower scaling."),
        ("kept", "half-life kept failed with 2 of 3 seeds; with beta2 fixed it failed with no seed."),
        ("fixed", "with beta2 fixed it failed with 2 of 3 seeds."),
    ],
)
def test_arms_in_which_seeds_failed_are_told_as_such(failed: str, said: str) -> None:
    gone = between("half_life/fixed_loss_above", NONE)
    gone |= between("half_life/kept_loss_above", NONE) if failed != "fixed" else {}
    assert said in sentences.half_life(SCALING | gone | {f"half_life/{failed}_failed_runs": 2})


def test_every_way_to_set_the_learning_rate_is_told_beside_the_one_that_judges_it() -> None:
    assert sentences.linear_scaling(SCALING) == (
        "Linear scaling from effective batch 16 to 8 times that: with warm-up it ends with a loss not told apart from "
        "that at 16 (-0.02 to +0.04), so up to 40% more is possible; without warm-up it ends with a loss 0.02 (0.01 to "
        "0.03) above that with warm-up; with the learning rate unscaled it ends with a loss 1.9 (1.8 to 2) above that "
        "with warm-up."
    )


def test_a_base_that_failed_carries_nothing() -> None:
    said = sentences.linear_scaling(SCALING | {"linear/base_failed_runs": 1})
    assert said.startswith("Effective batch 16, from which linear scaling departs, failed with 1 of 3 seeds: lower")


SMALLEST = {"reference_effective_batch": 128} | between("worth_it_loss_above_reference", NONE)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "could show: the loss there is not told apart from that at 16 (-0.01 to +0.02), so"),
        ({}, "(-0.01 to +0.02), so up to 10% more is possible. At 256 the loss"),
        (
            between("worth_it_loss_above_reference", (0.1, -0.1, 0.3)),
            "(-0.1 to +0.3), but it may be 2.5 times as large: so few seeds cannot tell. At 256",
        ),
        ({}, "At 256 the loss is 0.2 (0.1 to 0.3) above that at 16."),
        (between("worth_it_loss_above_reference", BELOW), "the loss there is 0.2 (0.1 to 0.3) below that"),
        (between("worth_it_loss_above_reference", (-0.2, -0.3, 0.0)), "(-0.3 to +0). At 256"),
        (
            SMALLEST,
            "128 a larger batch costs no quality that 3 seeds could show: it is the smallest arm.",
        ),
        ({"worse_from_effective_batch": None}, "It is the largest measured, so larger ones may be worth it too."),
        ({"worse_from_failed_runs": 1}, "At 256, 1 of 3 seeds failed."),
        ({}, "That is so at the learning rates set here: tuned at each batch, a larger one may keep its quality"),
    ],
)
def test_up_to_where_quality_lasts_is_told_with_how_sure_that_is(changes: dict[str, Any], said: str) -> None:
    assert said in sentences.quality(EFFICIENCY | changes)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (None, "Every arm failed with some seed: diverged, or ended worse than it began. Lower efficiency.base_lr"),
        (
            2.29,
            "Training hardly moved, in the smallest arm from validation loss 2.3 to 2.29, so there is nothing",
        ),
        (2.27, None),
    ],
)
def test_arms_that_did_not_train_say_nothing_of_effective_batches(loss: float | None, said: str | None) -> None:
    found = sentences.nothing_to_compare(EFFICIENCY | {"reference_validation_loss": loss})
    assert (found is None) if said is None else (said in str(found))


@pytest.mark.parametrize(
    ("quarters", "said", "drifts"),
    [
        ([(30, 20, 45)] * 4, "is, by quarter of training, 30 (20 to 45), 30 (20", False),
        ([(10, 5, 20), (30, 20, 45), (40, 19, 90), (30, 18, 60)], "no drift that these intervals show", False),
        ([(10, 5, 15), (30, 20, 45), (40, 19, 90), (30, 18, 60)], "targets: it drifts.", True),
        ([(30, 20, 45), (30, 20, 45), (90, 40, None), (None, 60, None)], "90 (40 to no bound), unbounded (60 to", True),
        ([(30, 20, 45), NONE, (30, 20, 45), (30, 20, 45)], "45), no gradient stands out of the noise, 30", True),
    ],
)
def test_the_noise_scale_is_told_by_quarter_with_whether_it_drifts(quarters: Any, said: str, drifts: bool) -> None:
    metrics = EFFICIENCY | by_quarter(quarters)
    assert said in str(sentences.noise_scale(metrics))
    assert sentences.drifts(metrics) is drifts


def test_the_middle_of_the_quarters_counts_what_has_no_bound_as_infinite() -> None:
    assert sentences.middle(by_quarter([(10, 5, 15), (20, 10, 40), (30, 20, 45), (None, 60, None)])) == 25
    assert sentences.middle(by_quarter([(10, 5, 15), NONE, NONE, (None, 60, None)])) == math.inf
    assert sentences.middle(by_quarter([NONE] * len(QUARTERS))) is None
    assert sentences.noise_scale(EFFICIENCY | by_quarter([NONE] * len(QUARTERS))) is None

from __future__ import annotations

from typing import Any

import pytest

from gradaccum.engine.batching import BatchPlan
from gradaccum.measurements.arms import ArmResult
from gradaccum.measurements.published import (
    Trial,
    half_life_arms,
    half_life_metrics,
    linear_arms,
    linear_metrics,
)
from gradaccum.measurements.scaling import Config, HalfLife, LinearScaling, measure
from gradaccum.measurements.setup import SGD, AdamW, Setup
from gradaccum.measurements.training import Arm, Evaluation, Run
from gradaccum.results import sentences
from gradaccum.results.outcome import Outcome

LINEAR: dict[str, Any] = {
    "micro_batch": 8,
    "accum_steps": [4, 1, 2],
    "samples": 64,
    "base_lr": 0.05,
    "warmup_fraction": 0.5,
}
HALF_LIFE: dict[str, Any] = {
    "micro_batch": 4,
    "accum_steps": [1, 4, 16],
    "samples": 64,
    "base_lr": 1e-3,
    "base_beta2": 0.95,
}


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    from gradaccum.config import read_params, shared

    config = Config(seeds=(1, 2, 3), decay="linear", linear=LinearScaling(**LINEAR), half_life=HalfLife(**HALF_LIFE))
    return measure(config, shared(read_params(), Setup))


def result(name: str, effective_batch: int, *ends: float | None) -> ArmResult:
    runs = tuple(Run((Evaluation(0, 0, None, 2.0, None), Evaluation(64, 8, end, end, None)), None) for end in ends)
    return ArmResult(Arm(name, BatchPlan(effective_batch, 4), SGD(lr=0.1)), runs)


def test_linear_scaling_departs_from_the_smallest_arm() -> None:
    arms = linear_arms(LinearScaling(**LINEAR), SGD(lr=9.0, momentum=0.9))
    shown = {(each.name, each.plan.effective_batch): each for each in arms}
    assert arms[0].name == "base"
    assert arms[0].plan.effective_batch == 8
    assert {key: each.settings.lr for key, each in shown.items()} == pytest.approx(
        {
            ("base", 8): 0.05,
            **{("unscaled", size): 0.05 for size in (16, 32)},
            **{(name, size): 0.05 * size / 8 for name in ("no_warm_up", "warm_up") for size in (16, 32)},
        }
    )
    assert all(isinstance(each.settings, SGD) and each.settings.momentum == 0.9 for each in arms)


def test_only_the_warm_up_arms_warm_up_and_from_the_bases_learning_rate() -> None:
    for each in linear_arms(LinearScaling(**LINEAR), SGD(lr=9.0)):
        if each.name == "warm_up":
            assert each.warmup_samples == 32
            assert each.warmup_start * each.settings.lr == pytest.approx(0.05)
        else:
            assert each.warmup_samples == 0


def test_half_life_departs_from_the_largest_arm() -> None:
    arms = half_life_arms(HalfLife(**HALF_LIFE), AdamW(lr=9.0, betas=(0.8, 0.5)))
    assert [(each.name, each.plan.effective_batch) for each in arms] == [
        ("base", 64),
        ("fixed", 16),
        ("half_life", 16),
        ("fixed", 4),
        ("half_life", 4),
    ]
    betas = [each.settings.betas for each in arms if isinstance(each.settings, AdamW)]
    assert [first for first, _ in betas] == [0.8] * 5
    assert [second for _, second in betas] == pytest.approx([0.95, 0.95, 0.95 ** (1 / 4), 0.95, 0.95 ** (1 / 16)])
    assert [each.settings.lr for each in arms] == pytest.approx([1e-3, 5e-4, 5e-4, 2.5e-4, 2.5e-4])


def test_a_rule_holds_up_to_the_last_arm_before_one_that_is_worse() -> None:
    base = result("base", 8, 0.10, 0.11, 0.12)
    found = linear_metrics(
        Trial(
            (
                *(result("unscaled", size, 0.3, 0.31, 0.32) for size in (16, 32, 64)),
                result("no_warm_up", 16, 0.11, 0.10, 0.12),
                result("no_warm_up", 32, 0.4, 0.4, None),
                result("no_warm_up", 64, 0.1, 0.11, 0.12),
                result("warm_up", 16, 0.1, 0.11, 0.12),
                result("warm_up", 32, 0.09, 0.11, 0.13),
                result("warm_up", 64, 0.5, 0.5, 0.5),
            ),
            base,
        )
    )
    assert found["linear/unscaled/holds_up_to_times"] == 1
    assert found["linear/no_warm_up/holds_up_to_times"] == 2
    assert found["linear/warm_up/holds_up_to_times"] == 4
    assert found["linear/holds"] is True


def test_linear_scaling_does_not_hold_where_warm_up_carries_it_no_further() -> None:
    trial = Trial(
        tuple(result(name, 16, 0.1, 0.11, 0.12) for name in ("unscaled", "no_warm_up", "warm_up")),
        result("base", 8, 0.10, 0.11, 0.12),
    )
    assert linear_metrics(trial)["linear/holds"] is False


@pytest.mark.parametrize(
    ("kept", "fixed", "holds"),
    [
        ([0.1, 0.2, 0.3], [0.15, 0.25, 0.35], True),
        ([0.1, 0.2, 0.3], [0.1, 0.2, 0.3], False),
        ([0.3, 0.4, 0.5], [0.6, 0.7, 0.8], False),
        ([0.1, 0.2, None], [0.15, 0.25, 0.35], False),
    ],
)
def test_half_life_holds_where_small_is_as_good_and_a_fixed_beta_worse(
    kept: list[float | None], fixed: list[float], holds: bool
) -> None:
    trial = Trial(
        (
            result("fixed", 16, 0.0, 0.0, 0.0),
            result("half_life", 16, 1.0, 1.0, 1.0),
            result("fixed", 4, *fixed),
            result("half_life", 4, *kept),
        ),
        result("base", 64, 0.1, 0.2, 0.3),
    )
    found = half_life_metrics(trial)
    assert found["half_life/effective_batch"] == 4
    assert found["half_life/holds"] is holds


def test_each_line_of_the_curve_begins_at_the_arm_it_departs_from(outcome: Outcome) -> None:
    lines = outcome.curve.series()
    assert set(lines) == {
        "linear/unscaled",
        "linear/no_warm_up",
        "linear/warm_up",
        "half_life/fixed",
        "half_life/half_life",
    }
    assert [point["effective_batch"] for point in lines["linear/warm_up"]] == [8, 16, 32]
    assert [point["effective_batch"] for point in lines["half_life/fixed"]] == [4, 16, 64]
    assert len({points[0]["validation_loss"] for name, points in lines.items() if name.startswith("linear")}) == 1


def test_what_was_measured_here_is_said_in_numbers(outcome: Outcome) -> None:
    assert outcome.findings == [
        sentences.linear_scaling(outcome.metrics),
        sentences.half_life(outcome.metrics),
    ]
    assert outcome.failures == ()


def test_the_base_is_shown_beside_what_departs_from_it(outcome: Outcome) -> None:
    shown = [(row["rule"], row["effective batch"]) for row in outcome.summary]
    assert shown[0] == ("linear/base", 8)
    assert ("half_life/base", 64) in shown


def test_what_decides_are_differences_to_the_base_and_to_the_papers_rule_at_the_same_batch(outcome: Outcome) -> None:
    at = {(point["series"], point["effective_batch"]): point for point in outcome.curve.points}
    ends = {key: point["validation_loss"] for key, point in at.items()}
    fixed = at["half_life/fixed", 16]
    assert fixed["loss_above_base"] == pytest.approx(ends["half_life/fixed", 16] - ends["half_life/fixed", 64])
    assert fixed["loss_above_rule"] == pytest.approx(ends["half_life/fixed", 16] - ends["half_life/half_life", 16])
    assert fixed["loss_above_rule_low"] <= fixed["loss_above_rule"] <= fixed["loss_above_rule_high"]
    for key in (("half_life/half_life", 16), ("half_life/fixed", 64)):
        assert at[key]["loss_above_rule"] is None
    assert at["linear/warm_up", 8]["loss_above_base"] is None
    assert {(point["departs_from"], point["seeds"]) for point in outcome.curve.points} == {(8, 3), (64, 3)}


def test_multiples_that_are_not_whole_are_told_as_they_are() -> None:
    base = result("base", 32, 0.1, 0.11, 0.12)
    arms = [result(name, 48, 0.1, 0.11, 0.12) for name in ("unscaled", "no_warm_up", "warm_up")]
    found = linear_metrics(Trial(tuple(arms), base))
    assert found["linear/warm_up/holds_up_to_times"] == found["linear/largest_times"] == 1.5


def test_nothing_holds_where_the_base_failed() -> None:
    base = result("base", 8, 0.1, 0.11, 2.5)
    linear = (
        *(result(name, 16, 0.5, 0.5, None) for name in ("unscaled", "no_warm_up")),
        result("warm_up", 16, 0.1, 0.1, 0.1),
    )
    assert linear_metrics(Trial(linear, base))["linear/holds"] is False
    half_life = (result("fixed", 4, 0.5, 0.5, 0.5), result("half_life", 4, 0.1, 0.1, 0.1))
    found = half_life_metrics(Trial(half_life, base))
    assert found["half_life/holds"] is False
    assert found["half_life/base_failed_runs"] == 1

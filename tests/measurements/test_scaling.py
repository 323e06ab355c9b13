from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

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


Ends = tuple[float | None, ...]


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
        ("twice_lr", 64),
        ("fixed", 16),
        ("half_life", 16),
        ("fixed", 4),
        ("half_life", 4),
    ]
    betas = [each.settings.betas for each in arms if isinstance(each.settings, AdamW)]
    assert [first for first, _ in betas] == [0.8] * 6
    assert [second for _, second in betas] == pytest.approx([0.95, 0.95, 0.95, 0.95 ** (1 / 4), 0.95, 0.95 ** (1 / 16)])
    assert [each.settings.lr for each in arms] == pytest.approx([1e-3, 2e-3, 5e-4, 5e-4, 2.5e-4, 2.5e-4])


def linear_trial(*, unscaled: Ends, no_warm_up: Ends, warm_up: Ends, base: Ends = (0.10, 0.11, 0.12)) -> Trial:
    """Arms at 16, which decide nothing, and at 32 samples."""
    ways = {"unscaled": unscaled, "no_warm_up": no_warm_up, "warm_up": warm_up}
    small = [result(name, 16, 0.0, 0.5, 1.0) for name in ways]
    return Trial((*small, *(result(name, 32, *ends) for name, ends in ways.items())), result("base", 8, *base))


def test_ways_to_set_the_learning_rate_are_compared_seed_by_seed_at_the_largest_arm() -> None:
    found = linear_metrics(
        linear_trial(unscaled=(0.9, 1.9, 1.4), no_warm_up=(0.13, 0.23, 0.182), warm_up=(0.1, 0.2, 0.15))
    )
    assert (found["linear/effective_batch"], found["linear/times"]) == (32, 4)
    assert found["linear/unscaled_loss_above"] == pytest.approx((0.8 + 1.7 + 1.25) / 3)
    assert found["linear/no_warm_up_loss_above"] == pytest.approx((0.03 + 0.03 + 0.032) / 3)
    assert found["linear/warm_up_loss_above"] == pytest.approx(0.15 - 0.11)
    worse = {name: found[f"linear/{name}_is_worse"] for name in ("unscaled", "no_warm_up", "warm_up")}
    assert worse == {"unscaled": True, "no_warm_up": True, "warm_up": False}  # seeds spread more than the last differs
    assert found["linear/base_validation_loss"] == pytest.approx(0.11)


def test_no_way_is_told_apart_from_an_equal_one_more_often_than_intervals_miss() -> None:
    random, repetitions, told = np.random.default_rng(0), 400, np.zeros(3)
    for _ in range(repetitions):
        ends = [tuple(each) for each in random.normal(0.1, 0.01, size=(4, 3)).tolist()]
        base, unscaled, no_warm_up, warm_up = ends
        found = linear_metrics(linear_trial(unscaled=unscaled, no_warm_up=no_warm_up, warm_up=warm_up, base=base))
        told += [found[f"linear/{name}_is_worse"] for name in ("unscaled", "no_warm_up", "warm_up")]
    assert (told <= binom.ppf(0.999, repetitions, 0.025)).all()


@pytest.mark.parametrize(
    ("kept", "fixed", "kept_is_worse", "fixed_is_worse"),
    [
        ([0.1, 0.2, 0.3], [0.15, 0.25, 0.35], False, True),
        ([0.1, 0.2, 0.3], [0.1, 0.2, 0.3], False, False),
        ([0.3, 0.4, 0.5], [0.6, 0.7, 0.8], True, True),
        ([0.1, 0.2, None], [0.15, 0.25, 0.35], True, True),
    ],
)
def test_half_life_is_compared_at_the_smallest_arm(
    kept: list[float | None], fixed: list[float], *, kept_is_worse: bool, fixed_is_worse: bool
) -> None:
    trial = Trial(
        (
            result("fixed", 16, 0.0, 0.0, 0.0),
            result("half_life", 16, 1.0, 1.0, 1.0),
            result("twice_lr", 64, 0.1, 0.2, 0.4),
            result("fixed", 4, *fixed),
            result("half_life", 4, *kept),
        ),
        result("base", 64, 0.1, 0.2, 0.3),
    )
    found = half_life_metrics(trial)
    assert found["half_life/effective_batch"] == 4
    assert found["half_life/twice_lr_loss_above"] == pytest.approx(0.1 / 3)
    assert found["half_life/kept_is_worse"] is kept_is_worse
    assert found["half_life/fixed_is_worse"] is fixed_is_worse
    assert found["half_life/kept_failed_runs"] == kept.count(None)


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
    arms = [result(name, 48, 0.1, 0.11, 0.12) for name in ("unscaled", "no_warm_up", "warm_up")]
    assert linear_metrics(Trial(tuple(arms), result("base", 32, 0.1, 0.11, 0.12)))["linear/times"] == 1.5


def test_a_base_that_failed_is_told() -> None:
    base = (0.1, 0.11, 2.5)
    worse = (0.5, 0.5, 0.5)
    found = linear_metrics(linear_trial(unscaled=worse, no_warm_up=worse, warm_up=(0.1, 0.1, 0.1), base=base))
    assert found["linear/base_failed_runs"] == 1
    half_life = (result("twice_lr", 8, *worse), result("fixed", 4, *worse), result("half_life", 4, 0.1, 0.1, 0.1))
    assert half_life_metrics(Trial(half_life, result("base", 8, *base)))["half_life/base_failed_runs"] == 1

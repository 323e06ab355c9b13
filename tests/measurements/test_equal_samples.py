"""What is concluded from how arms ended."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import binom

from gradaccum.engine.noise_scale import WindowNoise
from gradaccum.measurements.arms import ArmResult
from gradaccum.measurements.efficiency_results import outcome_of
from gradaccum.measurements.equal_samples import Comparison
from gradaccum.measurements.training import Run
from gradaccum.results.sentences import QUARTERS
from tests.measurements.arms_made_up import arm, compared, run


def test_quality_is_lost_from_where_on_every_arm_is_worse_than_the_smallest() -> None:
    comparison = compared(
        b4=[0.1, 0.2, 0.3], b8=[0.12, 0.19, 0.33], b16=[0.4, 0.5, 0.6], b32=[0.12, 0.19, 0.33], b64=[0.4, 0.5, 0.6]
    )
    assert comparison.reference is not None
    assert comparison.reference.effective_batch == 4
    assert comparison.worse_from == 64
    assert comparison.worth_it is not None
    assert comparison.worth_it.effective_batch == 32


def test_an_arm_that_happens_to_end_best_is_no_reference() -> None:
    comparison = compared(b4=[0.3, 0.31, 0.32], b8=[0.1, 0.1, 0.1], b16=[0.2, 0.2, 0.2])
    assert comparison.worse_from is None
    assert comparison.worth_it is not None
    assert comparison.worth_it.effective_batch == 16
    told = " ".join(outcome_of(comparison).findings)
    assert "the loss there is 0.11 (0.085 to 0.13) below that at 4" in told
    assert "the largest measured, so larger ones may be worth it too" in told


def test_of_sweeps_of_equal_arms_no_more_lose_quality_than_one_test_would_tell() -> None:
    random, repetitions, told = np.random.default_rng(0), 1000, 0
    names = [f"b{4 * 2**power}" for power in range(7)]
    for _ in range(repetitions):
        by_seed = random.normal(0.15, 0.02, size=3)
        ends = by_seed + random.normal(0, 0.01, size=(len(names), 3))
        told += compared(**dict(zip(names, ends.tolist(), strict=True))).worse_from is not None
    least, most = binom.interval(0.999, repetitions, 0.025)
    assert least <= told <= most


def test_seeds_are_paired_so_that_their_spread_hides_no_steady_difference() -> None:
    comparison = compared(b4=[0.1, 0.5, 0.9], b8=[0.2, 0.6, 1.001])
    assert comparison.worse_from == 8


def test_an_arm_in_which_a_seed_failed_is_worse_however_well_the_others_did() -> None:
    comparison = compared(b4=[0.2, 0.2, 0.2], b8=[0.1, 0.1, None], b16=[0.1, 0.1, 2.5])
    assert comparison.worse_from == 8
    assert outcome_of(comparison).metrics["worse_from_failed_runs"] == 1


def test_a_failed_seed_costs_quality_whatever_larger_arms_do() -> None:
    comparison = compared(b4=[0.2, 0.2, 0.2], b8=[0.1, 0.1, None], b16=[0.2, 0.2, 0.2])
    assert comparison.worse_from == 8


def test_the_reference_is_the_smallest_arm_that_did_not_fail() -> None:
    comparison = compared(b4=[0.1, 0.1, 2.5], b8=[0.2, 0.2, 0.2], b16=[0.2, 0.2, 0.2], b32=[0.3, 0.3, 0.3])
    assert comparison.reference is not None
    assert comparison.reference.effective_batch == 8
    assert comparison.worse_from == 32


def test_a_run_that_ends_worse_than_it_began_has_failed() -> None:
    comparison = compared(b4=[0.2, 0.2, 0.2], b8=[0.1, 0.1, 2.5])
    assert [result.failed_runs for result in comparison.results] == [0, 1]
    assert comparison.worse_from == 8


def test_an_arm_in_which_a_seed_failed_has_no_loss_to_show() -> None:
    outcome = outcome_of(compared(b4=[0.2, 0.2, 0.2], b8=[0.1, 0.1, 1e32]))
    assert [row["validation loss"] for row in outcome.summary] == ["0.2 (0.2 to 0.2)", "failed"]
    assert [point["validation_loss"] for point in outcome.curve.points] == [pytest.approx(0.2), None]
    assert outcome.summary[1]["above the smallest"] is None


def test_the_targets_are_what_every_run_reaches_of_the_good_arms_and_of_all_that_trained() -> None:
    comparison = compared(b4=[0.4, 0.5, 0.6], b8=[0.45, 0.5, 0.55], b16=[0.9, 1.0, 1.1], b32=[0.9, 0.9, 2.5])
    assert comparison.target_loss == 0.6
    assert comparison.common_target_loss == 1.1
    points = {point["effective_batch"]: point for point in outcome_of(comparison).curve.points}
    reached = [64 + 64 * (1.0 - 0.6) / (1.0 - end) for end in (0.4, 0.5, 0.6)]
    assert points[4]["samples_to_target"] == pytest.approx(sum(reached) / 3)
    assert points[4]["samples_to_target_low"] < min(reached)
    assert points[16]["samples_to_target"] is None
    assert points[16]["samples_to_common_target"] is not None
    assert points[32]["samples_to_common_target"] is None  # it failed with a seed


def test_how_sure_the_answer_is_stands_beside_it() -> None:
    comparison = compared(b4=[0.4, 0.5, 0.6], b8=[0.41, 0.5, 0.62], b16=[0.9, 1.01, 1.1])
    metrics = outcome_of(comparison).metrics
    assert metrics["worth_it_up_to_effective_batch"] == 8
    assert metrics["worth_it_loss_above_reference"] == pytest.approx(0.01)
    assert metrics["worth_it_loss_above_reference_low"] < 0 < metrics["worth_it_loss_above_reference_high"]
    assert metrics["worse_from_loss_above_reference"] == pytest.approx(1.51 / 3)
    assert metrics["worse_from_loss_above_reference_low"] > 0
    assert metrics["seeds"] == 3


def quartered(scales: Sequence[float]) -> Run:
    """Four windows a quarter, each as noisy as its quarter."""
    return run(1.0, 0.5, noise=[WindowNoise(scale, 1.0, 1) for scale in scales for _ in range(4)])


def test_the_noise_scale_of_the_headline_is_by_quarter_that_of_the_largest_arm_worth_it() -> None:
    noisy = [
        ArmResult(arm(size), tuple(quartered([size, 2.0 * size, 3.0 * size, 4.0 * size]) for _ in range(3)))
        for size in (8, 16)
    ]
    found = outcome_of(Comparison((ArmResult(arm(4), tuple(run(1.0, 0.5) for _ in range(3))), *noisy)))
    assert found.metrics["worth_it_up_to_effective_batch"] == 16
    assert found.metrics["noise_scale_effective_batch"] == 16
    assert [found.metrics[name] for name in QUARTERS] == [16.0, 32.0, 48.0, 64.0]


def test_an_arm_with_a_failed_seed_tells_no_noise_scale() -> None:
    sound, failed = quartered([1.0, 1.0, 1.0, 1.0]), run(1.0, None, noise=[WindowNoise(1.0, 1.0, 1)] * 8)
    assert ArmResult(arm(8), (sound, sound, sound)).noise
    assert not ArmResult(arm(8), (sound, sound, failed)).noise

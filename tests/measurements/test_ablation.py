from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from gradaccum.errors import ConfigError
from gradaccum.measurements import variants
from gradaccum.measurements.ablation import Config, VariantName, measure
from gradaccum.measurements.ablation_results import RIGHT_LOOP
from gradaccum.measurements.mistakes import CONTROL, ragged_cut
from gradaccum.measurements.setup import Setup
from gradaccum.measurements.variants import VARIANTS
from gradaccum.results.outcome import Outcome
from gradaccum.results.recipe import MISTAKES
from tests.measurements.series import logged_and_read_back

ALL = list(get_args(VariantName))


def config(**changes: Any) -> Config:
    given: dict[str, Any] = {
        "effective_batch": 16,
        "accum_steps": [2, 8],
        "variants": ALL,
        "clip_norm": 0.25,
        "optimizers": ["sgd", "adamw"],
        "num_steps": 3,
    }
    return Config(**{**given, **changes})


def points(outcome: Outcome) -> dict[tuple[str, int], Any]:
    return {(point["series"], point["accum_steps"]): point for point in outcome.curve.points}


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    from gradaccum.config import read_params, shared

    return measure(config(), shared(read_params(), Setup))


def test_the_claims_hold(outcome: Outcome) -> None:
    assert outcome.failures == []


@pytest.mark.parametrize("steps", [2, 8])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_naive_gradient_is_exactly_n_times_the_right_one(outcome: Outcome, optimizer: str, steps: int) -> None:
    assert points(outcome)[f"{optimizer}/naive", steps]["grad_norm_ratio"] == pytest.approx(steps, rel=1e-12)
    assert points(outcome)[f"{optimizer}/scaled", steps]["grad_norm_ratio"] == pytest.approx(1, rel=1e-12)
    assert points(outcome)[f"{optimizer}/scaled", steps]["param_diff_step1"] < 1e-12


def test_mean_of_means_is_wrong_on_the_ragged_cut_on_which_the_engine_is_right(outcome: Outcome) -> None:
    wrong, right = (points(outcome)[f"sgd/{name}", 8] for name in ("mean_of_means", "scaled_ragged"))
    assert wrong["cut"] == right["cut"] == ragged_cut(16, 8)
    assert wrong["param_diff_step1"] > 1e-4
    assert right["param_diff_step1"] < 1e-12


def test_windows_and_micro_batches_without_targets_break_no_claim(make_setup: Callable[..., Setup]) -> None:
    setup = make_setup("tests.own_workload:masked")
    alone = measure(config(effective_batch=1, accum_steps=[1], variants=["scaled", "naive"], num_steps=40), setup)
    cut = measure(config(effective_batch=8, accum_steps=[2, 4], num_steps=40), setup)
    assert alone.failures == cut.failures == []
    assert not any(point["diverged_at_step"] for point in [*alone.curve.points, *cut.curve.points])
    steps = [row["step"] for row in alone.tables["losses"] if row["series"] == "sgd/scaled"]
    assert 10 < len(steps) < 40


def test_windows_that_all_lack_targets_are_refused(make_setup: Callable[..., Setup]) -> None:
    setup = make_setup("tests.own_workload:masked")
    with pytest.raises(ConfigError, match="none of the 1 windows of 1 samples has a target"):
        measure(config(effective_batch=1, accum_steps=[1], variants=["scaled"], num_steps=1), setup)


def test_a_window_with_several_steps_has_no_single_gradient(outcome: Outcome) -> None:
    assert points(outcome)["sgd/step_every_micro", 8]["grad_norm_ratio"] is None
    assert outcome.metrics["sgd/step_every_micro/grad_norm_ratio"] is None


def test_every_headline_is_at_the_largest_n(outcome: Outcome) -> None:
    for name in ALL:
        for key in ("grad_norm_ratio", "param_diff_step1"):
            assert outcome.metrics[f"sgd/{name}/{key}"] == points(outcome)[f"sgd/{name}", 8][key]


def test_naive_sgd_is_the_engine_at_n_times_the_learning_rate(outcome: Outcome) -> None:
    assert outcome.metrics[f"sgd/{CONTROL}/gap_to_naive"] < 1e-15
    naive, control = (points(outcome)[f"sgd/{name}", 8]["final_loss"] for name in ("naive", CONTROL))
    assert naive == pytest.approx(control, rel=1e-5)


def test_the_control_holds_under_weight_decay(make_setup: Callable[..., Setup]) -> None:
    optimizers = {"sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, "adamw": {"lr": 1e-3}}
    outcome = measure(config(variants=["scaled", "naive"], optimizers=["sgd"]), make_setup(optimizers=optimizers))
    assert outcome.failures == []
    assert outcome.metrics[f"sgd/{CONTROL}/gap_to_naive"] < 1e-15


def test_all_arms_see_the_same_samples(outcome: Outcome) -> None:
    first = {series.name: series.values[0] for series in outcome.series if "step_every" not in series.name}
    assert max(first.values()) == pytest.approx(min(first.values()), rel=1e-6)


def test_sgd_breaks_where_adamw_hides_the_mistake(setup: Setup) -> None:
    run = measure(config(effective_batch=64, accum_steps=[32], variants=["scaled", "naive"], num_steps=20), setup)
    sgd, adamw = ([points(run)[f"{opt}/{name}", 32] for name in ("naive", "scaled")] for opt in ("sgd", "adamw"))
    assert sgd[0]["diverged_at_step"] or sgd[0]["final_loss"] > 2 * sgd[1]["final_loss"]
    assert adamw[0]["final_loss"] == pytest.approx(adamw[1]["final_loss"], rel=1e-2)
    assert any("adamw/naive" in finding and "the mistake hides" in finding for finding in run.findings)


def test_a_mistake_that_ends_lower_is_told_to_be_no_merit(setup: Setup) -> None:
    run = measure(config(variants=["scaled", "step_every_micro"], optimizers=["sgd"], num_steps=10), setup)
    wrong, right = (points(run)[f"sgd/{name}", 8]["final_loss"] for name in ("step_every_micro", "scaled"))
    assert wrong < 0.99 * right
    assert points(run)["sgd/step_every_micro", 8]["right_loop"] == "sgd/scaled"
    assert any(
        finding.startswith("At N=8, sgd/step_every_micro end below the right loop. A lower loss is no merit")
        for finding in run.findings
    )


def test_the_loop_that_was_meant_clips_and_cuts_as_the_mistake_does() -> None:
    for wrong, right in RIGHT_LOOP.items():
        mistake, meant = VARIANTS[wrong], VARIANTS[right]
        assert (meant.clipped, meant.ragged) == (mistake.clipped, mistake.ragged)
    assert RIGHT_LOOP.keys() == MISTAKES.keys()


def test_a_mistake_that_ends_no_lower_is_no_such_finding(setup: Setup) -> None:
    run = measure(config(variants=["scaled", "naive"], optimizers=["adamw"]), setup)
    assert not any("no merit" in finding for finding in run.findings)


def test_a_run_that_diverges_is_recorded_with_finite_numbers(make_setup: Callable[..., Setup]) -> None:
    optimizers = {"sgd": {"lr": 1e15}, "adamw": {"lr": 1e-3}}
    run = measure(config(variants=["scaled"], optimizers=["sgd"], num_steps=10), make_setup(optimizers=optimizers))
    point = points(run)["sgd/scaled", 8]
    assert 2 <= point["diverged_at_step"] <= 10
    assert point["final_loss"] is None
    assert run.metrics["sgd/scaled/diverged_at_step"] == point["diverged_at_step"]
    (series,) = (each for each in run.series if each.name == "sgd/scaled/loss/n8")
    assert len(series.values) == len(series.steps) == 10
    assert series.values[-1] is None
    assert all(math.isfinite(value) for value in series.values if value is not None)


def test_a_run_in_which_the_engine_does_not_divide_fails_the_claim(
    monkeypatch: pytest.MonkeyPatch, setup: Setup
) -> None:
    monkeypatch.setitem(variants.VARIANTS, "scaled", variants.VARIANTS["naive"])
    run = measure(config(variants=["scaled"], optimizers=["sgd"]), setup)
    assert any("sgd/scaled at N=8" in failure and "expected 1" in failure for failure in run.failures)


def test_on_unequal_counts_the_naive_ratio_claims_nothing(make_setup: Callable[..., Setup]) -> None:
    run = measure(
        config(effective_batch=4, accum_steps=[2], variants=["scaled", "naive", "mean_of_means"], num_steps=1),
        make_setup("definitions"),
    )
    assert run.failures == []
    assert points(run)["sgd/naive", 2]["grad_norm_ratio"] != pytest.approx(2, rel=1e-6)


@pytest.mark.parametrize(("batch", "steps"), [(16, 4), (64, 32), (64, 2), (5, 2), (7, 3)])
def test_a_ragged_cut_is_a_cut_of_unequal_sizes(batch: int, steps: int) -> None:
    cut = ragged_cut(batch, steps)
    assert sum(cut) == batch
    assert len(cut) == steps
    assert min(cut) >= 1
    assert len(set(cut)) > 1
    assert cut == sorted(cut)


def test_losses_are_listed_for_every_step(outcome: Outcome) -> None:
    rows = [row for row in outcome.tables["losses"] if (row["series"], row["accum_steps"]) == ("adamw/naive", 2)]
    assert [row["step"] for row in rows] == [1, 2, 3]


def test_what_is_logged_over_steps_can_be_read_back_from_the_files(outcome: Outcome, tmp_path: Path) -> None:
    logged, read = logged_and_read_back(outcome, tmp_path)
    assert logged
    assert read == logged


def test_an_arm_that_diverged_is_read_back_as_long_as_the_others(
    make_setup: Callable[..., Setup], tmp_path: Path
) -> None:
    optimizers = {"sgd": {"lr": 1e15}, "adamw": {"lr": 1e-3}}
    run = measure(config(accum_steps=[2], variants=["scaled"], num_steps=10), make_setup(optimizers=optimizers))
    logged, read = logged_and_read_back(run, tmp_path)
    assert logged["sgd/scaled/loss/n2"][-1] == (10, None)
    assert read == logged


@pytest.mark.parametrize("lr", [1e30, 1e300])
def test_a_learning_rate_that_no_step_survives_is_named(make_setup: Callable[..., Setup], lr: float) -> None:
    setup = make_setup(optimizers={"sgd": {"lr": lr}, "adamw": {"lr": 0.1}})
    with pytest.raises(ConfigError, match=r"Lower optimizers\.sgd\.lr"):
        measure(config(), setup)

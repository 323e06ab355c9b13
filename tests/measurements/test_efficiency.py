from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from gradaccum.engine.accumulator import Accumulator, StepResult
from gradaccum.engine.batching import Batch
from gradaccum.measurements.efficiency import measure
from gradaccum.measurements.equal_samples import make_arm
from gradaccum.measurements.setup import SGD, AdamW, Setup
from gradaccum.results.outcome import Outcome
from gradaccum.results.sentences import QUARTERS
from tests.measurements.arms_made_up import config
from tests.measurements.series import logged_and_read_back


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    from gradaccum.config import read_params, shared

    return measure(config(), shared(read_params(), Setup))


def test_every_arm_sees_the_same_samples_in_the_same_order(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    seen: dict[int, list[Batch]] = {}
    step = Accumulator.step

    def noting(self: Accumulator, window: Sequence[Batch]) -> StepResult:
        seen.setdefault(id(self), []).extend(window)
        kept.append(self)
        return step(self, window)

    kept: list[Accumulator] = []
    monkeypatch.setattr(Accumulator, "step", noting)
    measure(config(), setup)
    assert len(seen) == 9
    runs = list(seen.values())
    for first in range(0, 9, 3):
        of_seed = [torch.cat([inputs for inputs, _ in micro_batches]) for micro_batches in runs[first : first + 3]]
        assert len(of_seed[0]) == 256
        assert torch.equal(of_seed[0], of_seed[1])
        assert torch.equal(of_seed[0], of_seed[2])
    assert not torch.equal(runs[0][0][0], runs[3][0][0])


def test_all_arms_of_a_seed_begin_with_the_same_parameters(outcome: Outcome) -> None:
    begun = {row["validation_loss"] for row in outcome.tables["learning"] if row["samples"] == 0}
    assert len(begun) == 1


def test_two_measurements_are_the_same(outcome: Outcome) -> None:
    from gradaccum.config import read_params, shared

    again = measure(config(), shared(read_params(), Setup))
    assert again.curve == outcome.curve
    assert again.tables == outcome.tables


def test_arms_are_evaluated_at_the_same_samples_along_both_axes(outcome: Outcome) -> None:
    rows = outcome.tables["learning"]
    for effective_batch in (4, 8, 32):
        of_arm = [row for row in rows if row["effective_batch"] == effective_batch]
        assert [row["samples"] for row in of_arm] == list(range(0, 257, 32))
        assert [row["steps"] for row in of_arm] == [samples // effective_batch for samples in range(0, 257, 32)]
    names = {line.name: list(line.steps) for line in outcome.series}
    assert names["sgd/validation_loss_by_samples/b4"] == names["sgd/validation_loss_by_samples/b32"]
    assert names["sgd/validation_loss_by_steps/b32"] == list(range(9))


def test_the_noise_scale_is_told_for_each_quarter_wherever_a_window_has_two_micro_batches(outcome: Outcome) -> None:
    at = {point["effective_batch"]: point for point in outcome.curve.points}
    assert all(at[4][name] is None for name in QUARTERS)
    for effective_batch in (8, 32):
        for name in QUARTERS:
            low, scale = at[effective_batch][f"{name}_low"], at[effective_batch][name]
            assert scale is None or 0 < low < scale
    assert len({at[32][f"{name}_low"] for name in QUARTERS}) == 4
    along = {line.name: list(line.steps) for line in outcome.series if "noise_scale" in line.name}
    assert set(along["sgd/noise_scale_by_samples/b8"]) <= {32, 96, 160, 224}


@pytest.mark.parametrize(("scaling", "lrs"), [("none", [0.05] * 3), ("linear", [0.025, 0.05, 0.2])])
def test_settings_follow_the_rules(setup: Setup, scaling: str, lrs: list[float]) -> None:
    given = config(scaling=scaling, warmup_fraction=0.5 if scaling == "linear" else 0.0)
    arms = [make_arm(given, setup, steps) for steps in (1, 2, 8)]
    assert [each.settings.lr for each in arms] == pytest.approx(lrs)
    assert all(isinstance(each.settings, SGD) and each.settings.momentum == 0.9 for each in arms)


def test_the_half_life_rule_sets_adamws_second_beta(setup: Setup) -> None:
    given = config(optimizer="adamw", beta2_rule="half_life")
    betas = [make_arm(given, setup, steps).settings for steps in (1, 2, 8)]
    assert all(isinstance(settings, AdamW) for settings in betas)
    assert [settings.betas for settings in betas if isinstance(settings, AdamW)] == [
        (0.9, pytest.approx(0.999**times)) for times in (0.5, 1, 4)
    ]


def test_a_divergence_is_recorded_and_the_files_stay_finite(setup: Setup) -> None:
    found = measure(config(base_lr=1e30, warmup_fraction=0.0), setup)
    json.dumps([found.metrics, found.curve.to_json(), found.tables], allow_nan=False)
    assert found.metrics["failed_runs"] == 9
    assert found.metrics["worth_it_up_to_effective_batch"] is None
    assert all(1 <= point["diverged_at_step"] <= point["steps"] for point in found.curve.points)
    assert all(point["validation_loss"] is None for point in found.curve.points)
    assert len(found.tables["learning"]) == 27
    assert "Lower efficiency.base_lr" in " ".join(found.findings)


def test_what_is_logged_over_steps_can_be_read_back_from_the_files(outcome: Outcome, tmp_path: Path) -> None:
    logged, read = logged_and_read_back(outcome, tmp_path)
    assert logged
    assert read == logged

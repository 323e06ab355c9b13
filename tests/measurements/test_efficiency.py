from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from gradaccum.engine.accumulator import Accumulator, StepResult
from gradaccum.engine.batching import Batch, BatchPlan
from gradaccum.engine.noise_scale import WindowNoise
from gradaccum.engine.objective import Objective
from gradaccum.measurements import training
from gradaccum.measurements.arms import ArmResult
from gradaccum.measurements.bench import Bench
from gradaccum.measurements.efficiency import Config, measure
from gradaccum.measurements.efficiency_results import outcome_of
from gradaccum.measurements.equal_samples import Comparison, make_arm
from gradaccum.measurements.setup import SGD, AdamW, Setup
from gradaccum.measurements.training import Arm, Evaluation, Run, Trainer, evaluation_points, lr_factor
from gradaccum.results.outcome import Outcome


def config(**changes: Any) -> Config:
    given: dict[str, Any] = {
        "micro_batch": 4,
        "accum_steps": [1, 2, 8],
        "samples": 256,
        "seeds": [1, 2, 3],
        "optimizer": "sgd",
        "base_lr": 0.05,
        "base_effective_batch": 8,
        "scaling": "linear",
        "warmup_fraction": 0.5,
        "decay": "none",
        "beta2_rule": "fixed",
    }
    return Config(**{**given, **changes})


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    from gradaccum.config import read_params, shared

    return measure(config(), shared(read_params(), Setup))


def arm(effective_batch: int, *, name: str = "sgd") -> Arm:
    return Arm(name, BatchPlan(effective_batch, 4), SGD(lr=0.1))


def run(*losses: float | None, diverged: int | None = None, noise: Sequence[WindowNoise] = ()) -> Run:
    """A run whose validation loss began at 2, and went on as given, 64 samples apart."""
    return Run(
        tuple(
            Evaluation(64 * at, 8 * at, None if at == 0 else loss, loss, None if loss is None else 0.5, tuple(noise))
            for at, loss in enumerate([2.0, *losses])
        ),
        diverged,
    )


def compared(**ends: Sequence[float | None]) -> Comparison:
    """Arms `b8=...` by what each seed ended with."""
    return Comparison(
        tuple(ArmResult(arm(int(name[1:])), tuple(run(1.0, end) for end in losses)) for name, losses in ends.items())
    )


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


def test_the_noise_scale_is_told_wherever_a_window_has_two_micro_batches(outcome: Outcome) -> None:
    at = {point["effective_batch"]: point for point in outcome.curve.points}
    assert at[4]["noise_scale"] is None
    for effective_batch in (8, 32):
        point = at[effective_batch]
        assert point["noise_scale_low"] < point["noise_scale"]
    along = [row["noise_scale"] for row in outcome.tables["learning"] if row["effective_batch"] == 8]
    assert along[0] is None
    assert any(scale is not None for scale in along[1:])


@pytest.mark.parametrize(("samples", "batches"), [(256, [4, 8, 32]), (8192, [4, 256]), (9216, [16, 64, 96, 128])])
def test_evaluations_fall_where_every_arm_has_finished_a_window(samples: int, batches: list[int]) -> None:
    points = evaluation_points(samples, batches)
    assert points[0] == 0
    assert points[-1] == samples
    assert len(points) <= training.MOST_EVALUATIONS + 1
    assert all(point % effective == 0 for point in points for effective in batches)


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


def test_warm_up_counts_samples_whatever_the_effective_batch(setup: Setup) -> None:
    arms = [make_arm(config(), setup, steps) for steps in (4, 8)]
    for samples, share in ((0, 0.0), (64, 0.5), (128, 1.0), (256, 1.0)):
        for each in arms:
            lr = each.settings.lr * lr_factor(each, 256, samples // each.plan.effective_batch)
            assert lr == pytest.approx(0.05 + share * (each.settings.lr - 0.05))


def test_an_arm_below_the_base_needs_no_warm_up(setup: Setup) -> None:
    assert lr_factor(make_arm(config(), setup, 1), 256, 0) == 1.0


@pytest.mark.parametrize("steps", [2, 8])
def test_decay_reaches_zero_at_the_last_sample_in_every_arm(setup: Setup, steps: int) -> None:
    each = make_arm(config(decay="linear", warmup_fraction=0.0), setup, steps)
    shares = [lr_factor(each, 256, samples // each.plan.effective_batch) for samples in (0, 64, 192, 256)]
    assert shares == [1.0, 0.75, 0.25, 0.0]


def test_the_learning_rate_rises_once_an_applied_step(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    seen = []
    step = Accumulator.step

    def noting(self: Accumulator, window: Sequence[Batch]) -> StepResult:
        seen.append(self.optimizer.param_groups[0]["lr"])
        return step(self, window)

    monkeypatch.setattr(Accumulator, "step", noting)
    trainer = Trainer.with_seed(Bench.prepare(setup), 1, micro_batch=4, points=[0, 128, 256])
    trainer.train(make_arm(config(), setup, 8))
    assert seen == pytest.approx([0.05 + 0.15 * min(1, 32 * step / 128) for step in range(8)])


def test_the_validation_loss_is_the_mean_over_all_held_out_targets(setup: Setup) -> None:
    bench = Bench.prepare(setup)
    trainer = Trainer.with_seed(bench, 3, micro_batch=4, points=[0, 4])
    model = trainer.bench.model()
    evaluation = trainer.evaluate(model, samples=0, steps=0)
    inputs, labels = bench.workload.collate([bench.workload.validation[i] for i in range(297)])
    logits = model(inputs).detach()
    assert evaluation.validation_loss == pytest.approx(float(nn.functional.cross_entropy(logits, labels)), rel=1e-5)
    assert evaluation.validation_accuracy == pytest.approx(float((logits.argmax(1) == labels).float().mean()))
    assert model.training


def test_a_divergence_is_recorded_and_the_files_stay_finite(setup: Setup) -> None:
    found = measure(config(base_lr=1e30, warmup_fraction=0.0), setup)
    json.dumps([found.metrics, found.curve.to_json(), found.tables], allow_nan=False)
    assert found.metrics["failed_runs"] == 9
    assert found.metrics["worth_it_up_to_effective_batch"] is None
    assert all(1 <= point["diverged_at_step"] <= point["steps"] for point in found.curve.points)
    assert all(point["validation_loss"] is None for point in found.curve.points)
    assert len(found.tables["learning"]) == 27
    assert "Lower base_lr" in " ".join(found.findings)


def test_a_diverged_arm_spoils_no_other(setup: Setup) -> None:
    trainer = Trainer.with_seed(Bench.prepare(setup), 1, micro_batch=4, points=[0, 64, 128])
    before = trainer.train(arm(8))
    wild = trainer.train(Arm("sgd", BatchPlan(16, 4), SGD(lr=1e30)))
    assert wild.diverged_at_step is not None
    assert [evaluation.samples for evaluation in wild.evaluations] == [0, 64, 128]
    assert trainer.train(arm(8)) == before


def test_quality_is_lost_from_the_first_arm_that_is_worse_by_more_than_the_interval() -> None:
    comparison = compared(b4=[0.5, 0.6, 0.4], b8=[0.1, 0.2, 0.3], b16=[0.12, 0.19, 0.33], b32=[0.4, 0.5, 0.6])
    assert comparison.best is not None
    assert comparison.best.effective_batch == 8
    assert comparison.worse_from == 32
    assert comparison.worth_it is not None
    assert comparison.worth_it.effective_batch == 16


def test_a_smaller_arm_that_is_worse_is_no_loss_of_quality_from_larger_batches() -> None:
    comparison = compared(b4=[0.9, 0.9, 0.9], b8=[0.1, 0.1, 0.1])
    assert comparison.worse_from is None
    assert comparison.worth_it is not None
    assert comparison.worth_it.effective_batch == 8
    assert "maybe beyond" in " ".join(outcome_of(comparison).findings)


def test_seeds_are_paired_so_that_their_spread_hides_no_steady_difference() -> None:
    comparison = compared(b4=[0.1, 0.5, 0.9], b8=[0.2, 0.6, 1.001])
    assert comparison.worse_from == 8


def test_an_arm_in_which_a_seed_failed_is_worse_however_well_the_others_did() -> None:
    comparison = compared(b4=[0.2, 0.2, 0.2], b8=[0.1, 0.1, None], b16=[0.1, 0.1, 2.5])
    assert comparison.best is not None
    assert comparison.best.effective_batch == 4
    assert comparison.worse_from == 8
    assert outcome_of(comparison).metrics["worse_from_failed_runs"] == 1


def test_a_run_that_ends_worse_than_it_began_has_failed() -> None:
    comparison = compared(b4=[0.2, 0.2, 0.2], b8=[0.1, 0.1, 2.5])
    assert [result.failed_runs for result in comparison.results] == [0, 1]
    assert comparison.worse_from == 8


def test_the_target_is_what_the_best_arm_ends_with_up_to_its_interval() -> None:
    comparison = compared(b4=[0.4, 0.5, 0.6], b8=[0.9, 1.0, 1.1])
    assert comparison.target_loss == pytest.approx(0.5 + 4.302653 * 0.1 / 3**0.5)
    fast, slow = (comparison.samples_to_target(result) for result in comparison.results)
    assert fast == pytest.approx(64 + 64 * (1.0 - comparison.target_loss) / 0.5)
    assert slow is None


def test_the_noise_scale_of_the_headline_is_that_of_the_largest_arm_worth_it() -> None:
    noisy = [
        ArmResult(arm(size), tuple(run(1.0, 0.5, noise=[WindowNoise(float(size), 1.0, 1)]) for _ in range(3)))
        for size in (8, 16)
    ]
    found = outcome_of(Comparison((ArmResult(arm(4), tuple(run(1.0, 0.5) for _ in range(3))), *noisy)))
    assert found.metrics["worth_it_up_to_effective_batch"] == 16
    assert found.metrics["noise_scale"] == 16.0


def test_a_loss_of_several_terms_trains_without_a_noise_scale(make_setup: Callable[..., Setup]) -> None:
    bench = Bench.prepare(make_setup())
    plain = bench.workload.objective
    terms = Objective(
        loss_sum=lambda model, batch: {"a": plain.loss_sum(model, batch), "b": plain.loss_sum(model, batch)},
        count=lambda batch: {"a": plain.count(batch), "b": plain.count(batch)},
        weights={"a": 0.75, "b": 0.25},
    )
    several = Bench(training.replace(bench.workload, objective=terms), bench.device, bench.seed)
    ran = [Trainer.with_seed(each, 1, micro_batch=4, points=[0, 64]).train(arm(8)) for each in (bench, several)]
    assert ran[1].final.validation_loss == pytest.approx(ran[0].final.validation_loss, rel=1e-4)
    assert not ran[1].final.noise
    assert ran[0].final.noise

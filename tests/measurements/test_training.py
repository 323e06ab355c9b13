"""How arms train: where they are evaluated, and how their learning rate goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from torch import nn

from gradaccum.engine.accumulator import Accumulator, StepResult
from gradaccum.engine.batching import Batch, BatchPlan
from gradaccum.engine.objective import Objective
from gradaccum.measurements import training
from gradaccum.measurements.bench import Bench
from gradaccum.measurements.equal_samples import make_arm
from gradaccum.measurements.setup import SGD, Setup
from gradaccum.measurements.training import Arm, Trainer, evaluation_points, lr_factor, mean_of
from tests.measurements.arms_made_up import arm, config


@pytest.mark.parametrize(("samples", "batches"), [(256, [4, 8, 32]), (8192, [4, 256]), (9216, [16, 64, 96, 128])])
def test_evaluations_fall_where_every_arm_has_finished_a_window(samples: int, batches: list[int]) -> None:
    points = evaluation_points(samples, batches)
    assert points[0] == 0
    assert points[-1] == samples
    assert len(points) <= training.MOST_EVALUATIONS + 1
    assert all(point % effective == 0 for point in points for effective in batches)


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


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, bool]]:
    """The learning rate of each window, and whether its step was applied."""
    seen: list[tuple[float, bool]] = []
    step = Accumulator.step

    def noting(self: Accumulator, window: Sequence[Batch]) -> StepResult:
        rate, result = self.optimizer.param_groups[0]["lr"], step(self, window)
        seen.append((rate, result.applied))
        return result

    monkeypatch.setattr(Accumulator, "step", noting)
    return seen


def test_the_learning_rate_rises_once_a_window(rates: list[tuple[float, bool]], setup: Setup) -> None:
    trainer = Trainer.with_seed(Bench.prepare(setup), 1, micro_batch=4, points=[0, 128, 256])
    trainer.train(make_arm(config(), setup, 8))
    assert rates == [(pytest.approx(0.05 + 0.15 * min(1, 32 * step / 128)), True) for step in range(8)]


def test_a_window_without_targets_is_no_divergence_and_the_learning_rate_goes_on(
    rates: list[tuple[float, bool]], make_setup: Callable[..., Setup]
) -> None:
    setup = make_setup("tests.own_workload:masked")
    trainer = Trainer.with_seed(Bench.prepare(setup), 1, micro_batch=2, points=[0, 32, 64])
    run = trainer.train(Arm("sgd", BatchPlan(2, 2), SGD(lr=0.1), decay="linear"))
    assert run.diverged_at_step is None
    assert not run.failed
    assert [rate for rate, _ in rates] == pytest.approx([0.1 * (1 - step / 32) for step in range(32)])
    assert {applied for _, applied in rates} == {True, False}
    first, last = run.evaluations[1:]
    assert first.train_loss is not None
    assert last.train_loss is not None


def test_the_training_loss_is_that_of_the_windows_with_targets() -> None:
    assert mean_of([None, 1.0, None, 3.0]) == 2.0
    assert mean_of([None, None]) is None


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


def test_a_diverged_arm_spoils_no_other(setup: Setup) -> None:
    trainer = Trainer.with_seed(Bench.prepare(setup), 1, micro_batch=4, points=[0, 64, 128])
    before = trainer.train(arm(8))
    wild = trainer.train(Arm("sgd", BatchPlan(16, 4), SGD(lr=1e30)))
    assert wild.diverged_at_step is not None
    assert [evaluation.samples for evaluation in wild.evaluations] == [0, 64, 128]
    assert trainer.train(arm(8)) == before


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

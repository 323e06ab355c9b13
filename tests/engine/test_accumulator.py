from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gradaccum import Accumulator, BatchError, Objective, windows
from tests.engine.reference import (
    CLASSIFICATION,
    FEATURES,
    UNEVEN_CUTS,
    accumulated,
    assert_same,
    gradient_of,
    make_batch,
    make_model,
    mean_loss,
    parameters_of,
    same_state,
    snapshot,
    window_of,
)

SGD: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.SGD(  # noqa: E731
    model.parameters(), lr=0.1, momentum=0.9
)
ADAMW: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.AdamW(  # noqa: E731
    model.parameters(), lr=0.01, fused=True
)
OPTIMIZERS = pytest.mark.parametrize("make_optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
CUTS = pytest.mark.parametrize("cut", UNEVEN_CUTS, ids=str)


def masked(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = batch
    return inputs, torch.full_like(labels, -100)


@CUTS
@OPTIMIZERS
def test_a_window_steps_as_the_full_batch_does(
    cut: list[int], make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    model, plain = make_model(), make_model()
    optimizer, plain_optimizer = make_optimizer(model), make_optimizer(plain)
    accumulator = Accumulator(model, optimizer, CLASSIFICATION)
    for _ in range(3):  # so that momentum and moments matter
        loss = mean_loss(plain, make_batch())
        plain_optimizer.zero_grad()
        loss.backward()
        plain_optimizer.step()
        step = accumulator.step(window_of(cut))
        assert_same(accumulated(model), accumulated(plain))
        assert_same(parameters_of(model), parameters_of(plain))
        assert_same([step.loss], [loss.detach()])


@CUTS
def test_a_step_reports_its_window(cut: list[int]) -> None:
    model = make_model()
    reference = gradient_of(mean_loss(model, make_batch()), model)
    step = Accumulator(model, SGD(model), CLASSIFICATION).step(window_of(cut))
    norm = torch.linalg.vector_norm(torch.cat([part.flatten() for part in reference]))
    assert_same([step.grad_norm], [norm])
    assert (step.count, step.samples, step.micro_batches, step.sync_calls) == (12, 12, len(cut), 1)
    assert step.applied
    assert not step.skip_reason
    assert not step.loss.requires_grad
    assert not step.grad_norm.requires_grad


def test_sync_runs_on_every_backward_only_where_asked() -> None:
    model = make_model()
    assert Accumulator(model, SGD(model), CLASSIFICATION, sync="every").step(window_of([5, 4, 3])).sync_calls == 3


@CUTS
@pytest.mark.parametrize("clip_norm", [1e-3, 0.1, 1e3])
def test_the_whole_windows_gradient_is_clipped_once(cut: list[int], clip_norm: float) -> None:
    model, plain = make_model(), make_model()
    mean_loss(plain, make_batch()).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), clip_norm)
    step = Accumulator(model, SGD(model), CLASSIFICATION, clip_norm=clip_norm).step(window_of(cut))
    assert_same(accumulated(model), accumulated(plain))
    assert_same([step.grad_norm], [norm])


def test_a_last_short_window_is_divided_by_its_own_count_and_leaks_nothing() -> None:
    """Two epochs of micro-batches 4, 4, 4, 4, 3 in windows of 2 equal plain steps on 8, 8 and 3 samples."""
    model, plain = make_model(), make_model()
    accumulator, optimizer = Accumulator(model, SGD(model), CLASSIFICATION), SGD(plain)
    for _ in range(2):
        for window in windows(window_of([4, 4, 4, 4, 3]), 2):
            accumulator.step(window)
            optimizer.zero_grad()
            mean_loss(plain, tuple(torch.cat(parts) for parts in zip(*window, strict=True))).backward()
            optimizer.step()
            assert_same(parameters_of(model), parameters_of(plain))
    assert accumulator.steps == 6


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_micro_batch_without_targets_adds_nothing(where: int) -> None:
    window, model = window_of([5, 4, 3]), make_model()
    rest = [batch for index, batch in enumerate(window) if index != where]
    reference = gradient_of(mean_loss(model, tuple(torch.cat(parts) for parts in zip(*rest, strict=True))), model)
    window[where] = masked(window[where])
    step = Accumulator(model, SGD(model), CLASSIFICATION).step(window)
    assert_same(accumulated(model), reference)
    assert (step.sync_calls, step.micro_batches, step.samples) == (1, 3, 12)


@OPTIMIZERS
def test_a_window_without_any_target_moves_nothing_and_ticks_nothing(
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    model, called = make_model(), []
    optimizer = make_optimizer(model)
    scheduler = StepLR(optimizer, 1)
    accumulator = Accumulator(model, optimizer, CLASSIFICATION, scheduler=scheduler, after_step=[called.append])
    accumulator.step(window_of([5, 4, 3]))
    before = snapshot(model, optimizer, scheduler)
    step = accumulator.step([masked(batch) for batch in window_of([5, 4, 3])])
    assert same_state(snapshot(model, optimizer, scheduler), before)
    assert not step.applied
    assert "target" in step.skip_reason
    assert math.isnan(step.loss)
    assert step.grad_norm == 0
    assert (len(called), accumulator.steps, step.count, step.sync_calls) == (1, 1, 0, 0)


@pytest.mark.parametrize("accum_steps", [1, 2, 8])
def test_a_warm_up_of_ten_steps_takes_ten_windows(accum_steps: int) -> None:
    model = make_model()
    optimizer = SGD(model)
    warm_up = LambdaLR(optimizer, lambda tick: min(1.0, (tick + 1) / 11))
    accumulator = Accumulator(model, optimizer, CLASSIFICATION, scheduler=warm_up)
    rates = []
    for _ in range(10):
        accumulator.step(window_of([2] * accum_steps))
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1 * (tick + 1) / 11 for tick in range(1, 11)])


def test_callbacks_run_once_a_step_and_see_the_weights_after_it() -> None:
    model = make_model()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    accumulator = Accumulator(model, SGD(model), CLASSIFICATION, after_step=[average.update_parameters])
    expected: list[torch.Tensor] = []
    for _ in range(3):
        accumulator.step(window_of([5, 4, 3]))
        now = parameters_of(model)
        expected = [old.lerp(new, 0.5) for old, new in zip(expected or now, now, strict=True)]
    assert average.n_averaged == 3
    assert_same(parameters_of(average.module), expected)


def test_leftover_gradients_do_not_enter_the_window() -> None:
    model = make_model()
    reference = gradient_of(mean_loss(model, make_batch()), model)
    mean_loss(model, make_batch(seed=9)).backward()
    Accumulator(model, SGD(model), CLASSIFICATION).step(window_of([5, 4, 3]))
    assert_same(accumulated(model), reference)


def test_parameters_unfrozen_later_start_each_window_clean() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    accumulator = Accumulator(model, SGD(model), CLASSIFICATION)
    accumulator.step(window_of([5, 4, 3]))
    model[0].requires_grad_(True)
    for _ in range(2):
        reference = gradient_of(mean_loss(model, make_batch()), model)
        accumulator.step(window_of([5, 4, 3]))
        assert_same(accumulated(model), reference)


def test_parameters_outside_the_model_that_the_optimizer_steps_start_each_window_clean() -> None:
    model, temperature = make_model(), nn.Parameter(torch.ones((), dtype=torch.float64))
    objective = Objective(lambda model, batch: (model(batch[0]) * temperature).square().sum(), lambda batch: 1)
    accumulator = Accumulator(model, torch.optim.SGD([*model.parameters(), temperature], lr=1e-4), objective)
    for _ in range(2):
        expected = torch.autograd.grad(objective.loss_sum(model, make_batch()), temperature)[0]
        accumulator.step([make_batch()])
        assert_same([temperature.grad], [expected])


def test_an_empty_window_is_refused() -> None:
    model = make_model()
    with pytest.raises(BatchError, match="the window is empty"):
        Accumulator(model, SGD(model), CLASSIFICATION).step([])


def test_batches_may_be_dicts() -> None:
    model = make_model()
    objective = Objective(
        lambda model, batch: model(batch["inputs"]).square().sum(), lambda batch: len(batch["inputs"])
    )
    step = Accumulator(model, SGD(model), objective).step([{"inputs": torch.ones(3, FEATURES).double()}])
    assert (step.count, step.samples) == (3, 3)

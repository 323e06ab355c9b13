from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from gradaccum import Accumulator, BatchError, BatchPlan, ConfigError, Objective, fit_micro_batch, split
from gradaccum.engine.fitting import is_out_of_memory
from gradaccum.errors import PreflightWarning
from tests.engine.trials import SAMPLES, Stubborn, Watching, assert_same_bits, batches, made, whole_state


@pytest.fixture(autouse=True, scope="module")
def only_what_is_made_here_is_collected() -> Iterator[None]:
    """Every trial collects garbage; going through all of torch's objects each time would take most of the tests."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize(("most", "fits"), [(24, 24), (12, 12), (11, 6), (5, 3), (1, 1)])
def test_a_batch_that_does_not_fit_is_halved_until_it_does(most: int, fits: int) -> None:
    accumulator = made(most)
    (batch,) = batches(1)
    assert accumulator.step_batch(batch).micro_batches == -(-SAMPLES // fits)
    assert accumulator.model.seen[-1] == SAMPLES % fits or fits


@pytest.mark.parametrize("most", [12, 7, 1])
def test_a_halved_run_is_to_the_last_bit_the_run_with_that_micro_batch_from_the_start(most: int) -> None:
    halved = made(most, clip_norm=1.0)
    results = [halved.step_batch(batch) for batch in batches(5)]
    size = max(each for each in halved.model.seen if each <= most)
    direct = made(SAMPLES, clip_norm=1.0)
    expected = [direct.step_batch(batch, size) for batch in batches(5)]
    assert [float(each.loss) for each in results] == [float(each.loss) for each in expected]
    assert_same_bits(whole_state(halved), whole_state(direct))


def test_what_fitted_is_remembered_and_a_smaller_batch_is_left_whole() -> None:
    accumulator = made(6)
    for batch in batches(2):
        accumulator.step_batch(batch)
    accumulator.step_batch(batches(1, samples=5)[0])
    assert accumulator.model.seen == [24, 12, 6, 6, 6, 6] + [6] * 4 + [5]


def test_a_given_micro_batch_is_used_as_it_is() -> None:
    accumulator = made()
    result = accumulator.step_batch(batches(1)[0], 10)
    assert accumulator.model.seen == [10, 10, 4]
    assert result.samples == SAMPLES


def test_an_error_that_is_none_of_memory_is_not_retried() -> None:
    accumulator = made()
    inputs, labels = batches(1)[0]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        accumulator.step_batch((inputs[:, :4], labels))
    assert accumulator.model.seen == [24]


def test_memory_that_runs_out_at_one_sample_is_told_as_it_is() -> None:
    accumulator = made(0)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        accumulator.step_batch(batches(1)[0])
    assert accumulator.model.seen[-1] == 1


def test_memory_that_runs_out_in_the_optimizer_s_step_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = made()

    def exhausted(group: Any, *_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(accumulator.optimizer, "_init_group", exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        accumulator.step_batch(batches(1)[0])
    assert accumulator.model.seen == [24]


@pytest.mark.parametrize(("most", "micro", "steps"), [(24, 24, 1), (12, 12, 2), (11, 6, 4), (3, 3, 8), (2, 1, 24)])
def test_the_largest_divisor_that_fits_keeps_the_effective_batch(most: int, micro: int, steps: int) -> None:
    accumulator = made(most)
    plan = fit_micro_batch(accumulator, batches(1)[0])
    assert (plan.micro_batch, plan.accum_steps, plan.effective_batch) == (micro, steps, SAMPLES)


def test_micro_batches_too_small_for_the_model_are_passed_over() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), Objective.classification())
    (batch,) = batches(1)
    assert fit_micro_batch(accumulator, batch).micro_batch == SAMPLES
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        fit_micro_batch(accumulator, split(batch, 1)[0])


def test_ranks_multiply_the_effective_batch() -> None:
    accumulator = made(6)
    plan = fit_micro_batch(accumulator, batches(1)[0], world_size=4)
    assert plan == BatchPlan(effective_batch=96, micro_batch=6, world_size=4)


@pytest.mark.parametrize("steps_before", [0, 3])
def test_trials_leave_everything_to_the_last_bit_as_it_was(steps_before: int) -> None:
    called: list[int] = []
    accumulator = made(7, after_step=[lambda model: called.append(1)], observer=Watching(called))
    for batch in batches(steps_before):
        accumulator.step_batch(batch, 6)
    torch.rand(3)
    before = whole_state(accumulator)
    fit_micro_batch(accumulator, batches(1)[0])
    assert_same_bits(before, whole_state(accumulator))
    assert len(called) == 2 * steps_before


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError, ValueError])
def test_trials_put_every_kind_of_buffer_back_and_give_the_observer_back_whatever_fails(
    error: type[Exception] | None,
) -> None:
    model, after_step, observer = Stubborn(error), (lambda _: None,), Watching([])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, Objective.classification(), after_step=after_step, observer=observer)
    before, kept = whole_state(accumulator), dict(model.named_buffers())
    with pytest.raises(ValueError, match="hidden") if error is ValueError else nullcontext():
        assert fit_micro_batch(accumulator, batches(1)[0]).micro_batch == (24 if error is None else 6)
    assert (accumulator.after_step, accumulator.observer) == (after_step, observer)
    assert model.made is None
    assert all(kept[name] is buffer for name, buffer in model.named_buffers())
    assert_same_bits(before, whole_state(accumulator))


def test_a_halved_batch_starts_again_from_every_kind_of_buffer() -> None:
    model = Stubborn(torch.OutOfMemoryError)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), Objective.classification())
    (batch,) = batches(1)
    assert accumulator.step_batch(batch).micro_batches == 4
    assert model.replaced.tolist() == [4.0] * 5
    expected = torch.stack([piece.mean(0) for piece in batch[0].split(6)]).sum(0)
    torch.testing.assert_close(model.running, expected)


def test_nothing_that_fits_is_refused_and_leaves_everything_as_it_was() -> None:
    accumulator = made(0)
    before = whole_state(accumulator)
    with pytest.raises(BatchError, match="not even a micro-batch of 1 fits in memory"):
        fit_micro_batch(accumulator, batches(1)[0])
    assert_same_bits(before, whole_state(accumulator))


def test_ranks_that_could_wait_for_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.warns(PreflightWarning, match="one of 2 ranks"):
        accumulator = made()
    with pytest.raises(ConfigError, match=r"fit_micro_batch runs in a group of 2 ranks"):
        fit_micro_batch(accumulator, batches(1)[0])
    with pytest.raises(ConfigError, match=r"step_batch\(batch, 'auto'\) runs in a group of 2 ranks"):
        accumulator.step_batch(batches(1)[0])


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            True,
        ),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_errors_of_memory_are_told_from_others(error: BaseException, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one

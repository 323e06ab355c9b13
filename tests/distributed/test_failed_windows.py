"""What fails on one rank fails on all, and the next window starts clean."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradaccum import BatchError, Objective, RankError
from tests.distributed import models
from tests.distributed.pool import Pool
from tests.distributed.test_gradients import given
from tests.engine.reference import CLASSIFICATION, assert_same, make_batch, make_model, mean_loss

WRAPS = pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])


def uncountable() -> list[str]:
    """Rank 1 cannot count its second window; then all is well again."""
    calls = iter([False, dist.get_rank() == 1, False])

    def count(batch: Any) -> int:
        return -1 if next(calls) else len(batch[0])

    runner = models.accumulator_of("ddp", objective=Objective(CLASSIFICATION.loss_sum, count))
    batch = models.my_window([[6], [6]], make_batch())[0]
    runner.step([batch])
    before = models.parameters_of(runner.model)
    with pytest.raises((BatchError, RankError)) as refused:
        runner.step([batch])
    assert all(map(torch.equal, before, models.parameters_of(runner.model)))
    assert runner.step([batch]).applied
    return [type(refused.value).__name__, str(refused.value)]


def test_an_error_in_counting_on_one_rank_reaches_all_before_any_pass(ranks: Pool) -> None:
    first, second = ranks(2, uncountable)
    assert first[0] == "RankError"
    assert "rank 1 could not count the targets" in first[1]
    assert second[0] == "BatchError"


def late() -> str:
    """Rank 1 takes longer to its second window than the group's timeout allows."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    runner = models.accumulator_of("ddp", wrap_options={"process_group": group})
    window = models.my_window([[6], [6]], make_batch())
    runner.step(window)
    before = models.parameters_of(runner.model)
    if dist.get_rank() == 1:
        time.sleep(2.5)
    with pytest.raises(RankError) as lost:
        runner.step(window)
    assert all(map(torch.equal, before, models.parameters_of(runner.model)))
    return str(lost.value)


def test_a_rank_that_does_not_come_in_time_is_told_apart_from_one_that_is_gone(ranks: Pool) -> None:
    waiting, late_one = ranks(2, late)
    assert "another rank did not come within the process group's timeout" in waiting
    assert "another rank was lost in the middle of a window" in late_one


def interrupted(wrap: str, at: int, **options: Any) -> dict[str, Any]:
    """Every rank's loss raises at one micro-batch of the second window."""
    calls = iter(range(100))

    def loss_sum(model: nn.Module, batch: Any) -> Tensor:
        loss = CLASSIFICATION.loss_sum(model, batch)
        if next(calls) == 3 + at:
            raise ArithmeticError("the loss is not to be had")
        return loss

    runner = models.accumulator_of(wrap, objective=Objective(loss_sum, CLASSIFICATION.count), **options)
    window = models.my_window({2: [[3, 2, 1], [1, 2, 3]]}[dist.get_world_size()], make_batch())
    runner.step(window)
    with pytest.raises(ArithmeticError):
        runner.step(window)
    return models.train(runner, [window])


@WRAPS
@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_after_a_window_that_failed_everywhere_the_next_starts_clean(
    ranks: Pool, wrap: str, sync: str, at: int
) -> None:
    model = make_model()
    optimizer = models.OPTIMIZERS["sgd"](model)
    for _ in range(2):
        optimizer.zero_grad()
        mean_loss(model, make_batch()).backward()
        optimizer.step()
    for result in ranks(2, interrupted, wrap, at, sync=sync):
        assert_same(given(result["gradients"]), given([parameter.grad for parameter in model.parameters()]))
        assert_same(given(result["parameters"]), list(model.parameters()))

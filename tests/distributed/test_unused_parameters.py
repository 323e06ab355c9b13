"""Parameters that only some passes, or only some ranks, use; and those that none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from gradaccum import Accumulator, ConfigError, split
from tests.distributed import models
from tests.distributed.pool import Pool
from tests.distributed.test_gradients import given
from tests.engine.reference import CLASSIFICATION, assert_same, make_batch, make_model, mean_loss, window_of

WRAPS = pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])


class Branching(nn.Module):
    """Takes the second branch where the batch's first input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.always = make_model(seed=1)
        self.sometimes = make_model(seed=2)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.always(inputs)
        return out + self.sometimes(inputs) if bool(inputs[0, 0] > 100) else out


def marked(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    inputs = batch[0].clone()
    inputs[0, 0] = 101
    return inputs, batch[1]


def take_branches(model: nn.Module, where: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Windows in which the branch is used by these (rank, micro-batch) only."""
    batches = split(make_batch(), [3, 2, 4, 3])[2 * dist.get_rank() :][:2]
    for rank, index in where:
        if rank == dist.get_rank():
            batches[index] = marked(batches[index])
    accumulator = Accumulator(model, models.OPTIMIZERS["sgd"](model), CLASSIFICATION)
    return models.train(accumulator, [batches] * 2)


def branches(wrap: str, where: Sequence[tuple[int, int]], wrap_options: dict[str, Any]) -> dict[str, Any]:
    return take_branches(models.WRAPS[wrap](Branching(), **wrap_options), where)


def one_process_branches(where: Sequence[tuple[int, int]]) -> list[Tensor | None]:
    model = Branching()
    optimizer = models.OPTIMIZERS["sgd"](model)
    batches = split(make_batch(), [3, 2, 4, 3])
    for rank, index in where:
        batches[2 * rank + index] = marked(batches[2 * rank + index])
    for _ in range(2):
        optimizer.zero_grad()
        sum(mean_loss(model, batch) * len(batch[0]) / 12 for batch in batches).backward()
        optimizer.step()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("where", [[(0, 0), (1, 0)], [(0, 0)], [(1, 1)], [(0, 1), (1, 0)], []], ids=str)
def test_ddp_reduces_a_parameter_that_only_some_passes_use(ranks: Pool, where: list[tuple[int, int]]) -> None:
    expected = one_process_branches(where)
    for result in ranks(2, branches, "ddp", where, {"find_unused_parameters": True}):
        assert [gradient is None for gradient in result["gradients"]] == [gradient is None for gradient in expected]
        assert_same(given(result["gradients"]), given(expected))


def test_fsdp2_reduces_a_parameter_that_only_an_early_pass_uses(ranks: Pool) -> None:
    where = [(0, 0), (1, 0)]
    for result in ranks(2, branches, "fsdp2", where, {}):
        assert_same(given(result["gradients"]), given(one_process_branches(where)))


def unnoticed() -> tuple[str, bool]:
    """A parameter is unused in the last micro-batch, and DDP was not told to look for such."""
    model = Branching()
    accumulator = models.accumulator_of("ddp", model=model)
    before = models.parameters_of(model)
    first, second = window_of([6, 6])
    with pytest.raises(ConfigError) as refused:
        accumulator.step([marked(first), second])
    return str(refused.value), all(map(torch.equal, before, models.parameters_of(model)))


def test_ddp_that_reduced_nothing_is_noticed_in_the_same_step(ranks: Pool) -> None:
    for message, unmoved in ranks(2, unnoticed):
        assert "find_unused_parameters=True" in message
        assert unmoved


def frozen(wrap: str) -> dict[str, Any]:
    model = make_model()
    model[0].requires_grad_(False)
    return models.train(models.accumulator_of(wrap, model=model, clip_norm=0.1), [window_of([5, 4, 3])] * 2)


@WRAPS
@pytest.mark.parametrize("world", [2, 3])
def test_frozen_parameters_stay_and_the_others_are_reduced(ranks: Pool, wrap: str, world: int) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = models.OPTIMIZERS["sgd"](model)
    for _ in range(2):
        optimizer.zero_grad()
        mean_loss(model, make_batch()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    for result in ranks(world, frozen, wrap):
        assert_same(given(result["parameters"]), [parameter.detach() for parameter in model.parameters()])
        assert result["gradients"][:2] == [None, None]


def unfrozen() -> str:
    """A parameter that is trained from the second window on, as in gradual unfreezing."""
    model = make_model()
    model[0].requires_grad_(False)
    accumulator = models.accumulator_of("ddp", model=model)
    accumulator.step(window_of([5, 4, 3]))
    model[0].requires_grad_(True)
    before = models.parameters_of(model)
    with pytest.raises(ConfigError) as refused:
        accumulator.step(window_of([5, 4, 3]))
    assert all(map(torch.equal, before, models.parameters_of(model)))
    return str(refused.value)


def ignored() -> str:
    model = make_model()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    with pytest.raises(ConfigError) as refused:
        models.accumulator_of("ddp", model=model).step(window_of([5, 4, 3]))
    return str(refused.value)


@pytest.mark.parametrize("case", [unfrozen, ignored], ids=["unfrozen after wrapping", "ignored by DDP"])
def test_a_gradient_that_ddp_does_not_reduce_is_noticed_in_the_same_step(ranks: Pool, case: Callable[[], str]) -> None:
    for message in ranks(2, case):
        assert "parameter '0.weight' has a gradient that DistributedDataParallel does not reduce" in message


def in_one_group(where: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """The whole model is gathered and reduced at once, so every rank takes part in all of it."""
    model = fully_shard(Branching())
    model.set_reduce_scatter_unused_params(True)
    return take_branches(model, where)


@pytest.mark.parametrize("where", [[(0, 0)], [(1, 1)], [(0, 1), (1, 0)]], ids=str)
def test_fsdp2_reduces_what_one_rank_alone_uses_where_it_is_told_to(ranks: Pool, where: list[tuple[int, int]]) -> None:
    expected = one_process_branches(where)
    for result in ranks(2, in_one_group, where):
        assert_same(given(result["gradients"]), given(expected))


class Experts(nn.Module):
    """Two parts of the same size, of which the rank decides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = make_model(seed=1), make_model(seed=2)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = (self.second if dist.get_rank() else self.first)(inputs)
        return out


def each_rank_its_own_expert() -> tuple[str, bool]:
    accumulator = models.accumulator_of("fsdp2", model=Experts())
    before = models.parameters_of(accumulator.model)
    with pytest.raises(ConfigError) as refused:
        accumulator.step(models.my_window([[6], [6]], make_batch()))
    return str(refused.value), all(map(torch.equal, before, models.parameters_of(accumulator.model)))


def test_ranks_that_gather_different_parts_are_stopped_before_they_step(ranks: Pool) -> None:
    """The collectives pair up by size, so nothing else would notice."""
    for message, unmoved in ranks(2, each_rank_its_own_expert):
        assert "different orders" in message
        assert unmoved

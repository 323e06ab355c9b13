"""What cannot be right over ranks is refused when it is built; what fails on one rank fails on all."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.checkpoint import checkpoint

from gradaccum import Accumulator, BatchError, ConfigError, Objective, RankError, master_weights
from tests.distributed import models
from tests.distributed.pool import Pool
from tests.distributed.test_gradients import given
from tests.engine.reference import (
    CLASSIFICATION,
    assert_same,
    gradient_of,
    make_batch,
    make_model,
    mean_loss,
    window_of,
)

WRAPS = pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])


def accumulator(model: nn.Module, **options: Any) -> Accumulator:
    return Accumulator(model, models.OPTIMIZERS["sgd"](model), CLASSIFICATION, **options)


def static_graph() -> None:
    accumulator(models.ddp(make_model(), static_graph=True))


def ddp_in_ddp() -> None:
    accumulator(models.ddp(models.ddp(make_model())))


def ddp_in_a_plain_model() -> None:
    accumulator(nn.Sequential(models.ddp(make_model())))


def sharded_in_part() -> None:
    model = make_model()
    fully_shard(model[0])
    accumulator(model)


def ignored_parameter() -> None:
    model = make_model()
    accumulator(fully_shard(model, ignored_params={model[0].bias}))


def other_sharding() -> None:
    model = make_model()
    accumulator(FullyShardedDataParallel(model, device_id=torch.device("cpu")))


def threads_of_one_process() -> None:
    accumulator(nn.DataParallel(make_model()))


def divided_otherwise() -> None:
    model = models.fsdp2(make_model())
    model[0].set_gradient_divide_factor(1.0)
    accumulator(model)


def ranks_left_out() -> None:
    model = fully_shard(make_model(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"])
    accumulator(model)


def parameters_of_none() -> None:
    model = models.ddp(make_model())
    stepped = [*model.parameters(), nn.Parameter(torch.ones(()))]
    Accumulator(model, torch.optim.SGD(stepped, lr=0.1), CLASSIFICATION)


def masters() -> None:
    model = models.ddp(make_model(torch.bfloat16))
    held = master_weights(model)
    Accumulator(model, torch.optim.SGD(held, lr=0.1), CLASSIFICATION, master_weights=held)


def wide_sums() -> None:
    accumulator(models.ddp(make_model(torch.bfloat16)), accum_dtype=torch.float32)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, inputs: Tensor) -> Tensor:
        return checkpoint(self.layers[1:], self.layers[0](inputs), use_reentrant=True)


def reentrant_checkpoint() -> None:
    accumulator(models.ddp(Checkpointed())).step(window_of([5, 4, 3]))


def refusal(build: Callable[[], None]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 warns of itself
        try:
            build()
        except ConfigError as error:
            return str(error)
    return "it was not refused"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (static_graph, "static_graph=True"),
        (ddp_in_ddp, "module 'module' is wrapped inside a model that is wrapped itself"),
        (ddp_in_a_plain_model, "module '0' is wrapped inside a model that is not"),
        (sharded_in_part, "fully_shard on the parts and then on the model"),
        (ignored_parameter, "parameter '0.bias' of the sharded model is not sharded"),
        (other_sharding, "wrapped in FullyShardedDataParallel"),
        (threads_of_one_process, "wrapped in DataParallel"),
        (divided_otherwise, "gradient divide factor is set to 1.0"),
        (ranks_left_out, "on a mesh of 1 of 2 ranks"),
        (parameters_of_none, "the optimizer steps on 1 parameters that the model does not hold"),
        (masters, "Set sync='every'"),
        (wide_sums, "Set sync='every'"),
        (reentrant_checkpoint, "Pass use_reentrant=False"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_right_is_refused(ranks: Pool, build: Callable[[], None], message: str) -> None:
    for refused in ranks(2, refusal, build):
        assert message in refused


def wide_sums_of_every_reduction() -> dict[str, Any]:
    model = models.ddp(make_model(torch.bfloat16))
    wide = accumulator(model, accum_dtype=torch.float32, sync="every")
    return models.train(wide, [models.my_window([[5, 4], [3]], make_batch(dtype=torch.bfloat16))])


def test_wide_sums_are_right_where_every_pass_reduces(ranks: Pool) -> None:
    model = make_model(torch.bfloat16).double()
    inputs, labels = make_batch(dtype=torch.bfloat16)
    reference = gradient_of(mean_loss(model, (inputs.double(), labels)), model)
    for result in ranks(2, wide_sums_of_every_reduction):
        for found, right in zip(result["gradients"], reference, strict=True):
            torch.testing.assert_close(found.double(), right, rtol=0.05, atol=2e-3)


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

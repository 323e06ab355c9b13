"""What cannot be right over ranks is refused when it is built, or in the step that would be wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from gradaccum import Accumulator, ConfigError, PreflightWarning, master_weights
from tests.distributed import models
from tests.distributed.pool import Pool
from tests.engine.reference import (
    CLASSIFICATION,
    make_model,
    window_of,
)

WRAPS = pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])


def accumulator(model: nn.Module, **options: Any) -> Accumulator:
    return Accumulator(model, models.OPTIMIZERS["sgd"](model), CLASSIFICATION, **options)


def replicated() -> None:
    accumulator(replicate(make_model()))


def tensor_parallel() -> tuple[nn.Module, DeviceMesh]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(nn.Sequential(nn.Linear(6, 8)).double(), mesh["tensor"], plan), mesh["data"]


def tensor_parallel_alone() -> None:
    accumulator(tensor_parallel()[0])


def tensor_parallel_in_ddp() -> None:
    model, mesh = tensor_parallel()
    accumulator(models.ddp(model, device_mesh=mesh))


def inside_no_sync() -> None:
    runner = accumulator(models.ddp(make_model()))
    with runner.model.no_sync():
        runner.step(window_of([5, 4, 3]))


def inside_join() -> None:
    runner = accumulator(models.ddp(make_model()))
    with runner.model.join():
        try:
            runner.step(window_of([5, 4, 3]))
        finally:
            runner.model._join_config = runner.model._join_config._replace(enable=False)  # or leaving it waits


def loaded_on_one_rank() -> None:
    model = models.ddp(make_model())
    if dist.get_rank() == 1:
        model.module.load_state_dict(make_model(seed=5).state_dict())
    accumulator(model)


def replicas_seeded_apart() -> None:
    accumulator(models.hsdp(make_model(seed=dist.get_rank())))


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
        (replicated, "the model is wrapped in replicate"),
        (tensor_parallel_alone, "parameter '0.weight' is spread over ranks by tensor parallelism"),
        (tensor_parallel_in_ddp, "parameter 'module.0.weight' is spread over ranks by tensor parallelism"),
        (inside_no_sync, "Leave no_sync() to the engine"),
        (inside_join, "Leave join() out"),
        (loaded_on_one_rank, "parameter 'module.0.weight' is not the same on all ranks"),
        (replicas_seeded_apart, "parameter '0.weight' is not the same on all ranks"),
        (reentrant_checkpoint, "Pass use_reentrant=False"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_right_is_refused(ranks: Pool, build: Callable[[], None], message: str) -> None:
    for refused in ranks(2, refusal, build):
        assert message in refused


def plain_on_several_ranks() -> str:
    model = make_model()
    with pytest.warns(PreflightWarning) as warned:
        Accumulator(model, models.OPTIMIZERS["sgd"](model), CLASSIFICATION)
    assert warned[0].filename == __file__
    return str(warned[0].message)


def test_ranks_that_each_train_a_model_of_their_own_are_warned_of(ranks: Pool) -> None:
    for message in ranks(2, plain_on_several_ranks):
        assert "this is one of 2 ranks, but the model is spread over none" in message

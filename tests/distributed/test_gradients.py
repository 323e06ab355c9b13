"""Whatever each rank holds of a window, every rank steps as one process would on the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from gradaccum import Accumulator, split
from tests.distributed import models
from tests.distributed.models import OPTIMIZERS, SHARES, Shares
from tests.distributed.pool import Pool
from tests.engine.reference import CLASSIFICATION, assert_same, gradient_of, make_batch, make_model, mean_loss

CASES = [(world, shares) for world, choices in SHARES.items() for shares in choices]
EVERY_SHARE = pytest.mark.parametrize(("world", "shares"), CASES, ids=str)
WRAPS = pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
WORLDS = pytest.mark.parametrize("world", [2, 3])


def one_process(
    *,
    optimizer: str = "sgd",
    num_steps: int = 3,
    masks: Sequence[int] = (),
    clip_norm: float | None = None,
    model: nn.Module | None = None,
) -> dict[str, Any]:
    """Plain torch on the whole batch."""
    model = model or make_model()
    stepped = OPTIMIZERS[optimizer](model)
    losses, norms = [], []
    for _ in range(num_steps):
        loss = mean_loss(model, models.masked(make_batch(), masks))
        stepped.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip_norm or float("inf")))
        stepped.step()
        losses.append(loss.detach())
    gradients = [parameter.grad for parameter in model.parameters()]
    return {"losses": losses, "norms": norms, "gradients": gradients, "parameters": models.parameters_of(model)}


def assert_as_one(results: Sequence[Any], expected: dict[str, Any]) -> None:
    """Gradients, parameters, losses and norms are one process's, and the last two the same bits on every rank."""
    for result in results:
        assert_same(given(result["gradients"]), given(expected["gradients"]))
        assert_same(given(result["parameters"]), given(expected["parameters"]))
        assert_same([step["loss"] for step in result["steps"]], expected["losses"])
        assert_same([step["grad_norm"] for step in result["steps"]], expected["norms"])
        for step, first in zip(result["steps"], results[0]["steps"], strict=True):
            assert torch.equal(step["loss"], first["loss"])
            assert torch.equal(step["grad_norm"], first["grad_norm"])


def given(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


@EVERY_SHARE
@WRAPS
@pytest.mark.parametrize("sync", ["last", "every"])
def test_ranks_step_as_one_process_on_the_full_batch(
    ranks: Pool, world: int, shares: Shares, wrap: str, sync: str
) -> None:
    results = ranks(world, models.train_shares, wrap, shares, sync=sync)
    assert_as_one(results, one_process())
    for result in results:
        assert [(step["count"], step["samples"], step["applied"]) for step in result["steps"]] == [(12, 12, True)] * 3


@WORLDS
@WRAPS
def test_adamw_keeps_the_same_moments_on_ranks(ranks: Pool, world: int, wrap: str) -> None:
    assert_as_one(
        ranks(world, models.train_shares, wrap, SHARES[world][1], optimizer="adamw"), one_process(optimizer="adamw")
    )


@WORLDS
@WRAPS
@pytest.mark.parametrize("masks", [[0, 1, 2, 3], [5, 6, 7, 8, 9, 10, 11], range(5)], ids=str)
def test_unequal_counts_divide_by_the_targets_of_all_ranks(
    ranks: Pool, world: int, wrap: str, masks: Sequence[int]
) -> None:
    """Averaging the ranks' own means would weigh a rank with 2 targets as much as one with 7."""
    results = ranks(world, models.train_shares, wrap, SHARES[world][1], masks=masks)
    assert_as_one(results, one_process(masks=masks))
    assert results[0]["steps"][0]["count"] == 12 - len(masks)


@WORLDS
@WRAPS
@pytest.mark.parametrize("clip_norm", [1e-3, 0.1, 1e3])
def test_the_global_norm_is_clipped_once(ranks: Pool, world: int, wrap: str, clip_norm: float) -> None:
    results = ranks(world, models.train_shares, wrap, SHARES[world][1], clip_norm=clip_norm)
    assert_as_one(results, one_process(clip_norm=clip_norm))


@pytest.mark.parametrize("shares", SHARES[2], ids=str)
def test_replicas_of_shards_count_every_gradient_once(ranks: Pool, shares: Shares) -> None:
    assert_as_one(ranks(2, models.train_shares, "hsdp", shares, clip_norm=0.1), one_process(clip_norm=0.1))


def train_in_groups() -> dict[str, Any]:
    """Ranks 0 and 1 share the batch; rank 2 has all of it, in a group of its own."""
    group = [dist.new_group([0, 1]), dist.new_group([2])][dist.get_rank() // 2]
    first, second, third = split(make_batch(), [5, 4, 3])
    window = [[first, third], [second], [first, second, third]][dist.get_rank()]
    return models.train(models.accumulator_of("ddp", wrap_options={"process_group": group}), [window] * 3)


def test_ranks_of_a_group_step_as_one_process_whatever_others_do(ranks: Pool) -> None:
    *pair, alone = ranks(3, train_in_groups)
    assert_as_one(pair, one_process())
    assert_as_one([alone], one_process())


@pytest.mark.parametrize(
    ("wrap", "options"),
    [
        ("ddp", {"gradient_as_bucket_view": True}),
        ("ddp", {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}),
        ("ddp", {"broadcast_buffers": False, "find_unused_parameters": True}),
        ("fsdp2", {"reshard_after_forward": False}),
        ("fsdp2", {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("sync", ["last", "every"])
def test_options_of_torch_s_wrappers_change_no_gradient(
    ranks: Pool, wrap: str, options: dict[str, Any], sync: str
) -> None:
    results = ranks(2, models.train_shares, wrap, SHARES[2][2], wrap_options=options, sync=sync, clip_norm=0.1)
    assert_as_one(results, one_process(clip_norm=0.1))


def train_in_bf16() -> dict[str, Any]:
    """Passes in bf16, everything that is summed in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = models.fsdp2(make_model(torch.float32), mp_policy=policy)
    accumulator = Accumulator(model, models.OPTIMIZERS["sgd"](model), CLASSIFICATION)
    return models.train(accumulator, [models.my_window(SHARES[2][2], make_batch(dtype=torch.float32))])


def test_fsdp2_s_mixed_precision_loses_what_bf16_passes_lose_and_no_more(ranks: Pool) -> None:
    expected = one_process(num_steps=1)
    for result in ranks(2, train_in_bf16):
        for found, right in zip(result["gradients"], expected["gradients"], strict=True):
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), right, rtol=0.05, atol=2e-3)


@WORLDS
def test_keeping_parameters_gathered_changes_no_gradient_and_saves_gathers(ranks: Pool, world: int) -> None:
    shares = {2: [[1, 1, 1], [9]], 3: [[1, 1, 1], [8], [1]]}[world]
    gathered = {}
    for keep in (True, False):
        results = ranks(world, models.train_shares, "fsdp2", shares, keep_gathered=keep)
        gathered[keep] = results[0]["steps"][1]["gathered_bytes"]
    assert gathered[True] < gathered[False]


def wide_sums_of_every_reduction() -> dict[str, Any]:
    model = models.ddp(make_model(torch.bfloat16))
    wide = Accumulator(model, models.OPTIMIZERS["sgd"](model), CLASSIFICATION, accum_dtype=torch.float32, sync="every")
    return models.train(wide, [models.my_window([[5, 4], [3]], make_batch(dtype=torch.bfloat16))])


def test_wide_sums_are_right_where_every_pass_reduces(ranks: Pool) -> None:
    model = make_model(torch.bfloat16).double()
    inputs, labels = make_batch(dtype=torch.bfloat16)
    reference = gradient_of(mean_loss(model, (inputs.double(), labels)), model)
    for result in ranks(2, wide_sums_of_every_reduction):
        for found, right in zip(result["gradients"], reference, strict=True):
            torch.testing.assert_close(found.double(), right, rtol=0.05, atol=2e-3)

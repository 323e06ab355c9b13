"""One reduction a window, counted where it is issued."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh

from gradaccum import Accumulator, ConfigError, counted, gradient_sync
from gradaccum.engine.traffic import traffic_of
from tests.distributed import models
from tests.distributed.pool import Pool
from tests.engine.reference import CLASSIFICATION, assert_same, make_batch, make_model, mean_loss, window_of

GRADIENT_BYTES = 8 * (6 * 5 + 5 + 5 * 4 + 4)
PADDED_BYTES = 8 * (6 * 6 + 6 + 4 * 5 + 4)
"""Over two shards: the layer of 5 outputs is padded to 6."""
WORLDS = pytest.mark.parametrize("world", [2, 3])
SMALL_BUCKETS = {"bucket_cap_mb": 1e-4}


def windows_of(wrap: str, accum_steps: int, wrap_options: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Three windows; in the first, DDP still has to find its buckets."""
    accumulator = models.accumulator_of(wrap, wrap_options=wrap_options, **options)
    return [models.plain(accumulator.step(window_of([2] * accum_steps))) for _ in range(3)]


def counts(results: list[Any], name: str) -> set[int]:
    """What every rank counted in the last window."""
    return {steps[-1][name] for steps in results}


@WORLDS
@pytest.mark.parametrize("wrap_options", [{}, SMALL_BUCKETS], ids=["one bucket", "several buckets"])
def test_ddp_reduces_once_a_window_and_n_times_where_asked(ranks: Pool, world: int, wrap_options: Any) -> None:
    last, every, single = (
        ranks(world, windows_of, "ddp", accum_steps, wrap_options, sync=sync)
        for accum_steps, sync in ((4, "last"), (4, "every"), (1, "last"))
    )
    (buckets,) = counts(single, "reductions")
    assert buckets > 1 if wrap_options else buckets == 1
    assert counts(last, "reductions") == {buckets}
    assert counts(every, "reductions") == {4 * buckets}
    assert counts(last, "reduced_bytes") == {GRADIENT_BYTES}
    assert counts(every, "reduced_bytes") == {4 * GRADIENT_BYTES}
    assert (counts(last, "sync_calls"), counts(every, "sync_calls")) == ({1}, {4})
    assert counts(last, "gathered_bytes") == {0}


def test_fsdp2_reduces_once_a_window_and_n_times_where_asked(ranks: Pool) -> None:
    last, every, gathered = (
        ranks(2, windows_of, "fsdp2", 4, {}, **options) for options in ({}, {"sync": "every"}, {"keep_gathered": True})
    )
    assert counts(last, "reductions") == counts(gathered, "reductions") == {2}
    assert counts(every, "reductions") == {8}
    (padded,) = counts(last, "reduced_bytes")
    assert padded == PADDED_BYTES
    assert counts(every, "reduced_bytes") == {4 * padded}
    assert counts(every, "gathered_bytes") == counts(last, "gathered_bytes")
    assert counts(last, "gathered_bytes") == {2 * 4 * padded}  # forward and backward of every pass
    assert counts(gathered, "gathered_bytes") == {5 * padded}


def windows_of_replicas(shards: int) -> tuple[dict[str, Any], list[Any]]:
    """The last of three windows over replicas of so many shards, and its gradients."""
    shape = (dist.get_world_size() // shards, shards)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    accumulator = models.accumulator_of("fsdp2", wrap_options={"mesh": mesh})
    window = models.my_window([[2, 1]] * dist.get_world_size(), make_batch(3 * dist.get_world_size()))
    steps = [models.plain(accumulator.step(window)) for _ in range(3)]
    return steps[-1], models.gradients_of(accumulator.model)


@pytest.mark.parametrize(
    ("world", "shards", "reductions", "reduced_bytes"),
    [(2, 1, 2, GRADIENT_BYTES), (4, 2, 4, PADDED_BYTES + PADDED_BYTES // 2)],
    ids=["one shard", "two shards"],
)
def test_replicas_of_shards_count_their_all_reduces_as_well(
    ranks: Pool, world: int, shards: int, reductions: int, reduced_bytes: int
) -> None:
    """One a layer between the replicas of a shard, after the shards' own if there are several."""
    model, batch = make_model(), make_batch(3 * world)
    optimizer = models.OPTIMIZERS["sgd"](model)
    for _ in range(3):
        optimizer.zero_grad()
        mean_loss(model, batch).backward()
        optimizer.step()
    for step, gradients in ranks(world, windows_of_replicas, shards):
        assert (step["reductions"], step["reduced_bytes"]) == (reductions, reduced_bytes)
        assert_same(gradients, [parameter.grad for parameter in model.parameters()])


def hooks_of_ones_own() -> tuple[int, list[int]]:
    """What the engine counted, and what a hook saw that was set before."""
    seen: list[int] = []
    model = models.hsdp(make_model())
    for layer in (model[0], model[2]):
        layer.set_all_reduce_hook(lambda reduced: seen.append(reduced.nbytes))
    step = Accumulator(model, models.OPTIMIZERS["sgd"](model), CLASSIFICATION).step(window_of([5, 4, 3]))
    return step.reduced_bytes, seen


def test_an_all_reduce_hook_of_ones_own_is_still_called(ranks: Pool) -> None:
    for counted_bytes, seen in ranks(2, hooks_of_ones_own):
        assert sum(seen) == counted_bytes == GRADIENT_BYTES


def forward_outside_no_sync() -> int:
    """The usual mistake: only backward runs without sync."""
    model = models.ddp(make_model())
    traffic = traffic_of(model)
    for index, batch in enumerate(window_of([4, 4, 4])):
        loss = mean_loss(model, batch)
        with gradient_sync(model, enabled=index == 2):
            loss.backward()
    return traffic.reductions


def test_a_forward_pass_outside_no_sync_reduces_all_the_same(ranks: Pool) -> None:
    """Which is why the engine's is inside, where a window counts one."""
    assert ranks(2, forward_outside_no_sync) == [3, 3]


def with_hook(hook: Any) -> list[dict[str, Any]]:
    model = models.ddp(make_model().float())
    model.register_comm_hook(None, hook())
    accumulator = Accumulator(model, models.OPTIMIZERS["sgd"](model), CLASSIFICATION)
    return [models.plain(accumulator.step([make_batch(dtype=next(model.parameters()).dtype)])) for _ in range(2)]


def counting_compression() -> Any:
    return counted(fp16_compress_hook)


def uncounted() -> Any:
    return allreduce_hook


def test_a_hook_of_ones_own_is_counted(ranks: Pool) -> None:
    assert counts(ranks(2, with_hook, counting_compression), "reduced_bytes") == {GRADIENT_BYTES // 2}


def refusal_of_hook() -> str:
    with pytest.raises(ConfigError) as refused:
        with_hook(uncounted)
    return str(refused.value)


def test_a_hook_that_does_not_count_is_refused(ranks: Pool) -> None:
    assert "Register it as counted(hook)" in ranks(2, refusal_of_hook)[0]


def two_accumulators(wrap: str) -> list[int]:
    model = models.WRAPS[wrap](make_model())
    reductions = []
    for _ in range(2):
        accumulator = Accumulator(model, models.OPTIMIZERS["sgd"](model), CLASSIFICATION)
        reductions.append(accumulator.step(window_of([5, 4, 3])).reductions)
    return reductions


@pytest.mark.parametrize(("wrap", "expected"), [("ddp", [1, 1]), ("fsdp2", [2, 2])])
def test_a_second_accumulator_counts_each_reduction_once(ranks: Pool, wrap: str, expected: list[int]) -> None:
    assert ranks(2, two_accumulators, wrap) == [expected] * 2


def collectives_of_a_window(wrap: str) -> list[str]:
    """Names of the small collectives that the engine itself issues."""
    accumulator = models.accumulator_of(wrap, clip_norm=1.0)
    accumulator.step(window_of([5, 4, 3]))
    issued: list[str] = []
    original = dist.all_gather

    def noting(*args: Any, **options: Any) -> Any:
        issued.append("all_gather")
        return original(*args, **options)

    dist.all_gather = noting
    try:
        accumulator.step(window_of([5, 4, 3]))
    finally:
        dist.all_gather = original
    return issued


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_a_window_costs_one_exchange_before_and_one_after_its_passes(ranks: Pool, wrap: str) -> None:
    assert ranks(2, collectives_of_a_window, wrap) == [["all_gather"] * 2] * 2

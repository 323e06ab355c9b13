"""Ranks that do not hold the same: data that ends earlier, targets that only some have, nothing to count."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradaccum import Accumulator, BatchError, ConfigError, Objective, split, windows
from gradaccum.engine.ranks import buffers_unchanged
from tests.distributed import models
from tests.distributed.pool import Pool
from tests.distributed.test_gradients import given
from tests.engine.reference import assert_same, make_batch, make_model, mean_loss, window_of

WRAPS = pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])

LOADERS = {2: [[3, 2, 4, 1, 2], [5]], 3: [[1], [2, 3, 1], [4, 4, 2, 1]]}
"""Micro-batches of each rank's epoch."""


def epochs(wrap: str, accum_steps: int) -> dict[str, Any]:
    """Two epochs over loaders of different lengths."""
    accumulator = models.accumulator_of(wrap)
    loaders = LOADERS[dist.get_world_size()]
    loader = models.my_window(loaders, make_batch(sum(map(sum, loaders))))
    taken = [window for _ in range(2) for window in windows(loader, accum_steps)]
    return {"lengths": [len(window) for window in taken], **models.train(accumulator, taken)}


def one_process_epochs(world: int, accum_steps: int) -> tuple[list[Tensor], int]:
    """The same samples in the same windows, each as one batch."""
    model = make_model()
    optimizer = models.OPTIMIZERS["sgd"](model)
    loaders = LOADERS[world]
    pieces = iter(split(make_batch(sum(map(sum, loaders))), [size for loader in loaders for size in loader]))
    per_rank = [[next(pieces) for _ in loader] for loader in loaders]
    most = max(math.ceil(len(loader) / accum_steps) for loader in loaders)
    for _ in range(2):
        for number in range(most):
            window = [b for loader in per_rank for b in loader[number * accum_steps : (number + 1) * accum_steps]]
            optimizer.zero_grad()
            mean_loss(model, tuple(map(torch.cat, zip(*window, strict=True)))).backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()], most


@WRAPS
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("accum_steps", [1, 2, 3])
def test_a_rank_whose_data_ends_earlier_adds_nothing_and_stays_in_step(
    ranks: Pool, wrap: str, world: int, accum_steps: int
) -> None:
    expected, most = one_process_epochs(world, accum_steps)
    results = ranks(world, epochs, wrap, accum_steps)
    for result in results:
        assert len(result["lengths"]) == 2 * most
        assert_same(given(result["parameters"]), expected)
        assert [step["sync_calls"] for step in result["steps"]] == [1] * (2 * most)
    assert {0} < {length for result in results for length in result["lengths"]}


def own_windows() -> list[int]:
    loader = [make_batch()] * (1 + dist.get_rank())
    return [len(window) for window in windows(loader, 1, ranks="own")]


def test_windows_of_ones_own_end_with_ones_own_loader(ranks: Pool) -> None:
    assert ranks(2, own_windows) == [[1], [1, 1]]


def dropping() -> list[int]:
    return [len(window) for window in windows([make_batch()] * (2 + 3 * dist.get_rank()), 2, drop_last=True)]


def test_dropping_a_short_window_keeps_ranks_together(ranks: Pool) -> None:
    assert ranks(2, dropping) == [[2, 0], [2, 2]]


def nothing_to_count(wrap: str) -> list[dict[str, Any]]:
    """A window without targets on rank 1, one without any on all ranks, and one of no micro-batches."""
    accumulator = models.accumulator_of(wrap)
    batch = make_batch()
    window = [models.masked(batch, range(12))] if dist.get_rank() else [batch]
    return [models.plain(accumulator.step(w)) for w in (window, [models.masked(batch, range(12))], [])]


@WRAPS
def test_ranks_without_targets_step_with_the_others_or_not_at_all(ranks: Pool, wrap: str) -> None:
    expected = mean_loss(make_model(), make_batch()).detach()
    for some, none, empty in ranks(2, nothing_to_count, wrap):
        assert_same([some["loss"]], [expected])
        assert (some["count"], some["samples"], some["applied"]) == (12, 24, True)
        for step in (none, empty):
            assert (step["count"], step["applied"], step["sync_calls"]) == (0, False, 0)
            assert math.isnan(step["loss"])


def no_batch_at_all() -> str:
    with pytest.raises(BatchError) as refused:
        models.accumulator_of("ddp").step([make_batch()] if dist.get_rank() == 0 else [])
    return str(refused.value)


def test_a_rank_that_never_had_a_micro_batch_is_refused_on_all(ranks: Pool) -> None:
    assert all("rank 1 has had no micro-batch so far" in message for message in ranks(2, no_batch_at_all))


def batch_norm_replayed() -> dict[str, Any]:
    """Rank 1 has one micro-batch where rank 0 has three."""
    with pytest.warns(UserWarning, match="module '0' is a BatchNorm1d, whose running statistics"):
        accumulator = models.accumulator_of("ddp", model=nn.Sequential(nn.BatchNorm1d(6), make_model()).double())
    for window in (window_of([6]), window_of([6]) if dist.get_rank() else window_of([4, 4, 4])):
        accumulator.step(window)
    return {name: buffer.clone() for name, buffer in accumulator.model.module[0].named_buffers()}


def test_a_replayed_batch_does_not_enter_running_statistics(ranks: Pool) -> None:
    first, second = ranks(2, batch_norm_replayed)
    assert int(first["num_batches_tracked"]) == 4
    assert int(second["num_batches_tracked"]) == 2
    assert not torch.equal(first["running_mean"], second["running_mean"])  # the drift that the warning tells of


def test_a_replayed_batch_enters_statistics_that_all_ranks_share() -> None:
    """SyncBatchNorm's, which runs on CUDA only: kept back on the replaying rank, they would differ from the others'."""
    model = nn.Sequential(nn.BatchNorm1d(6), nn.SyncBatchNorm(6))
    with torch.no_grad(), buffers_unchanged(model):
        for buffer in model.buffers():
            buffer.add_(1)
    assert [int(layer.num_batches_tracked) for layer in model] == [0, 1]


def several_terms() -> list[dict[str, Any]]:
    """The second term has targets on rank 1 only."""
    objective = Objective(
        lambda model, batch: {"all": model(batch[0]).square().sum(), "some": model(batch[0]).abs().sum()},
        lambda batch: {"all": len(batch[0]), "some": dist.get_rank() * len(batch[0])},
        weights={"all": 1.0, "some": 0.5},
    )
    accumulator = models.accumulator_of("ddp", objective=objective)
    return models.train(accumulator, [models.my_window([[5, 4], [3]], make_batch())])


def test_a_term_that_only_one_rank_counts_is_divided_by_that_count(ranks: Pool) -> None:
    model, (inputs, _) = make_model(), make_batch()
    loss = model(inputs).square().sum() / 12 + 0.5 * model(inputs[9:]).abs().sum() / 3
    loss.backward()
    for result in ranks(2, several_terms):
        assert_same(given(result["gradients"]), [parameter.grad for parameter in model.parameters()])
        assert_same([result["steps"][0]["loss"]], [loss.detach()])


def overflowing(wrap: str) -> tuple[dict[str, Any], float]:
    """The gradient overflows on rank 1 alone."""
    model = models.WRAPS[wrap](make_model(torch.float32))
    objective = Objective(lambda model, batch: (model(batch[0]) * batch[1].max()).sum(), lambda batch: len(batch[0]))
    accumulator = Accumulator(model, models.OPTIMIZERS["sgd"](model), objective, precision="fp16")
    inputs, _ = make_batch(dtype=torch.float32)
    step = accumulator.step([(inputs, torch.full((12,), 1e38 if dist.get_rank() else 1.0))])
    return models.plain(step), accumulator.loss_scale.value


@WRAPS
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Pool, wrap: str) -> None:
    for step, scale in ranks(2, overflowing, wrap):
        assert not step["applied"]
        assert scale == 32768


def test_windows_refuse_an_unknown_kind_of_ranks() -> None:
    with pytest.raises(ConfigError, match="ranks='some' is unknown"):
        windows([], 2, ranks="some")

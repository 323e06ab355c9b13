"""A run over ranks that is saved between windows and resumed goes on as if it had never stopped, to the last bit."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradaccum import Accumulator, windows
from tests.distributed import models
from tests.distributed.pool import Pool
from tests.engine.reference import CLASSIFICATION, make_batch, make_model

LOADERS = [[3, 2, 4, 1, 2], [5, 1, 1, 2, 3]]
"""Micro-batches of each rank's epoch; two a window."""


def run_of(wrap: str, seed: int = 0) -> Accumulator:
    """AdamW with a schedule, and dropout that differs by rank."""
    model = models.WRAPS[wrap](nn.Sequential(nn.Dropout(0.2), *make_model(seed=seed)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return Accumulator(model, optimizer, CLASSIFICATION, scheduler=scheduler)


def my_windows() -> list[Any]:
    return list(windows(models.my_window(LOADERS, make_batch(sum(map(sum, LOADERS)))), 2))


def by_rank(run: Accumulator, folder: Path) -> None:
    """Each rank its own file: as many ranks must come back."""
    torch.save({"model": run.model.state_dict(), "run": run.state_dict()}, folder / f"{dist.get_rank()}.pt")


def from_rank(run: Accumulator, folder: Path) -> None:
    state = torch.load(folder / f"{dist.get_rank()}.pt")
    run.model.load_state_dict(state["model"])
    run.load_state_dict(state["run"])


def as_the_docs_save(run: Accumulator, folder: Path) -> None:
    functions_of_the_docs()["save"](run, folder)


def as_the_docs_resume(run: Accumulator, folder: Path) -> None:
    functions_of_the_docs()["resume"](run, folder)


def functions_of_the_docs() -> dict[str, Any]:
    functions: dict[str, Any] = {}
    exec(models.docs_block("checkpoints.py"), functions)
    return functions


WAYS: dict[str, tuple[Callable[[Accumulator, Path], None], Callable[[Accumulator, Path], None]]] = {
    "by rank": (by_rank, from_rank),
    "as the docs do": (as_the_docs_save, as_the_docs_resume),
}


def resumed(wrap: str, way: str, folder: Path) -> tuple[Any, Any]:
    """Parameters and moments of a run of three windows, and of one that is saved after the first."""
    save, load = WAYS[way]
    torch.manual_seed(dist.get_rank())
    whole, (first, *others) = run_of(wrap), my_windows()
    whole.step(first)
    save(whole, folder)
    dist.barrier()
    for window in others:
        whole.step(window)
    torch.manual_seed(99)
    after = run_of(wrap, seed=5)
    load(after, folder)
    for window in others:
        after.step(window)
    return held(whole), held(after)


def held(run: Accumulator) -> list[Tensor]:
    moments = [value for state in run.optimizer.state.values() for value in state.values()]
    tensors = [models.whole(tensor) for tensor in [*run.model.parameters(), *moments]]
    rates = [torch.tensor([run.steps, run.optimizer.param_groups[0]["lr"]])]
    return [tensor for tensor in tensors if tensor is not None] + rates


class RankKilledError(Exception):
    """Stands for it."""


def trained_as_the_docs_show(folder: Path, *, saves: int) -> tuple[list[Tensor], int]:
    """Runs the page's script until it has saved so often; its parameters and random state, and how often it stepped."""
    folder.mkdir(exist_ok=True)
    checkpoints, left, steps = ModuleType("checkpoints"), itertools.count(1), Accumulator.step
    checkpoints.__dict__.update(functions_of_the_docs())

    def save(run: Accumulator, where: Path) -> None:
        as_the_docs_save(run, where)
        if next(left) == saves:
            raise RankKilledError

    vars(checkpoints)["save"] = save
    sys.modules["checkpoints"] = checkpoints
    here = {"WORLD_SIZE": str(dist.get_world_size()), "RANK": str(dist.get_rank())}
    script, names = models.changed_as_the_docs_show(models.docs_block("train.py")), {}
    with (
        contextlib.chdir(folder),
        patch.dict(os.environ, here),
        patch.multiple(dist, init_process_group=Mock(), destroy_process_group=Mock()),
        patch.object(Accumulator, "step", autospec=True, side_effect=steps) as stepped,
        contextlib.suppress(RankKilledError),
    ):
        exec(script, names)
    return [*names["model"].parameters(), torch.get_rng_state()], stepped.call_count


def stopped_and_not(folder: Path) -> tuple[Any, Any, Any]:
    whole = trained_as_the_docs_show(folder / "whole", saves=-1)
    first = trained_as_the_docs_show(folder / "stopped", saves=3)
    torch.manual_seed(99)
    return whole, first, trained_as_the_docs_show(folder / "stopped", saves=-1)


def test_the_script_of_the_docs_goes_on_after_the_windows_that_it_has_done(ranks: Pool, tmp_path: Path) -> None:
    for (whole, steps), (_, before), (resumed, after) in ranks(2, stopped_and_not, tmp_path):
        assert (steps, before, after) == (8, 3, 5)
        assert all(map(torch.equal, resumed, whole))


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(
    ranks: Pool, tmp_path: Path, wrap: str, way: str
) -> None:
    (whole, after), (others, _) = ranks(2, resumed, wrap, way, tmp_path)
    assert len(after) == len(whole) > 8
    assert all(map(torch.equal, after, whole))
    assert all(map(torch.equal, others, whole))

"""Models over ranks, and what they did, in a form that compares with one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gradaccum import Accumulator, StepResult, split
from tests.engine.reference import CLASSIFICATION, make_batch, make_model

Batch = tuple[Tensor, Tensor]
Shares = Sequence[Sequence[int]]
"""Sizes of the micro-batches of each rank's window."""

SHARES: dict[int, list[Shares]] = {
    2: [[[6], [6]], [[5, 4], [3]], [[1], [2, 7, 1, 1]], [[4, 4, 4], []]],
    3: [[[4], [4], [4]], [[5], [1, 1, 1], [3, 1]], [[], [11], [1]], [[2, 2], [1, 3, 1], [3]]],
}


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options)


def fsdp2(model: nn.Module, **options: Any) -> nn.Module:
    """Every layer with parameters is a group of its own, what is left another."""
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def hsdp(model: nn.Module) -> nn.Module:
    """Replicas of one shard each."""
    return fsdp2(model, mesh=init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replica", "shard")))


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {"ddp": ddp, "fsdp2": fsdp2, "hsdp": hsdp}
OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


def my_window(shares: Shares, batch: Batch) -> list[Batch]:
    """This rank's part of a batch that is dealt out in order."""
    sizes = [size for share in shares for size in share]
    start = sum(len(share) for share in shares[: dist.get_rank()])
    return split(batch, sizes)[start : start + len(shares[dist.get_rank()])]


def masked(batch: Batch, positions: Sequence[int]) -> Batch:
    labels = batch[1].clone()
    labels[list(positions)] = -100
    return batch[0], labels


def whole(tensor: Tensor | None) -> Tensor | None:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach().clone()
    return None if tensor is None else tensor.detach().clone()


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    return [whole(parameter.grad) for parameter in model.parameters()]


def parameters_of(model: nn.Module) -> list[Tensor | None]:
    return [whole(parameter) for parameter in model.parameters()]


def plain(step: StepResult) -> dict[str, Any]:
    return step._asdict()


def accumulator_of(
    wrap: str = "ddp",
    *,
    model: nn.Module | None = None,
    optimizer: str = "sgd",
    wrap_options: Any = None,
    **options: Any,
) -> Accumulator:
    spread = WRAPS[wrap](model or make_model(), **(wrap_options or {}))
    return Accumulator(spread, OPTIMIZERS[optimizer](spread), options.pop("objective", CLASSIFICATION), **options)


def train(accumulator: Accumulator, windows: Iterable[list[Batch]]) -> dict[str, Any]:
    """Every window's result, the last one's gradients, and the parameters after it."""
    steps = [plain(accumulator.step(window)) for window in windows]
    return {
        "steps": steps,
        "gradients": gradients_of(accumulator.model),
        "parameters": parameters_of(accumulator.model),
    }


def train_shares(wrap: str, shares: Shares, *, num_steps: int = 3, masks: Sequence[int] = (), **options: Any) -> Any:
    """Windows of the same samples, the first dealt out evenly, so that every rank has a batch to keep."""
    batch = masked(make_batch(), masks)
    dealt = [SHARES[dist.get_world_size()][0], *[shares] * (num_steps - 1)]
    return train(accumulator_of(wrap, **options), [my_window(each, batch) for each in dealt])


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def docs_block(name: str) -> str:
    """The code of a file that the page on ranks shows."""
    page = (Path(__file__).parents[2] / "docs/many-ranks.md").read_text()
    blocks: list[str] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (block,) = [block for block in blocks if block.startswith(f"# {name}\n")]
    return block


def changed_as_the_docs_show(code: str) -> str:
    """A file of that page with the page's one change to it."""
    page = (Path(__file__).parents[2] / "docs/many-ranks.md").read_text()
    (change,) = re.findall(r"```diff\n@@\n(.*?)```", page, re.DOTALL)
    for hunk in change.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] != other) for other in "+-")
        assert code.count(before) == 1, before
        code = code.replace(before, after)
    return code

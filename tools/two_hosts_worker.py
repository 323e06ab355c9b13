"""One rank of the two hosts: takes windows, and reads what each sent over its host's interface."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradaccum import Accumulator, Objective

FEATURES, MICRO_BATCH, WARM_UP = 64, 4, 2

Sync = Literal["last", "every"]


def sent_bytes(interface: str) -> int:
    """The interface's own counter, headers included."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def model_of(hidden: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, hidden), nn.GELU(), nn.Linear(hidden, FEATURES))


def take(accum_steps: int, sync: Sync, options: argparse.Namespace) -> dict[str, Any]:
    """Some windows, each timed between barriers; the barriers' bytes stay outside."""
    model = DistributedDataParallel(model_of(options.hidden))
    objective = Objective(lambda model, batch: model(batch).square().sum(), len)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=1e-6), objective, sync=sync)
    window = [torch.randn(MICRO_BATCH, FEATURES) for _ in range(accum_steps)]
    walls, sent = [], []
    for _ in range(WARM_UP + options.steps):
        dist.barrier()
        before, start = sent_bytes(options.interface), perf_counter()
        step = accumulator.step(window)
        walls.append(1000 * (perf_counter() - start))
        sent.append(sent_bytes(options.interface) - before)
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "accum_steps": accum_steps,
        "sync": sync,
        "sync_calls": step.sync_calls,
        "reductions": step.reductions,
        "reduced_bytes": step.reduced_bytes,
        "gradient_bytes": gradient_bytes,
        "sent_bytes": median(sent[WARM_UP:]),
        "step_ms": median(walls[WARM_UP:]),
    }


def points(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for accum_steps in options.accum_steps:
        for sync in ("last", "every"):
            yield take(accum_steps, sync, options)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--accum-steps", type=int, nargs="+", required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--interface", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = list(points(options))
    dist.barrier()
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

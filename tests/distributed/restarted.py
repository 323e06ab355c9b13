"""Trains four windows and saves after each; in torchrun's first try, rank 1 fails before the third."""

from __future__ import annotations

import os
from pathlib import Path

import checkpoints
import torch
import torch.distributed as dist

from tests.distributed import models
from tests.engine.reference import make_batch

FOLDER = Path("saved")

dist.init_process_group("gloo")
first_try = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
accumulator = models.accumulator_of("fsdp2")
checkpoints.resume(accumulator, FOLDER)
resumed_at = accumulator.steps
for window in range(resumed_at, 4):
    if first_try and dist.get_rank() == 1 and window == 2:
        raise SystemExit("rank 1 fails before its third window")
    accumulator.step(models.my_window([[5, 4], [3]], make_batch()))
    checkpoints.save(accumulator, FOLDER)
found = {"resumed_at": resumed_at, "parameters": models.parameters_of(accumulator.model)}
torch.save(found, f"{dist.get_rank()}.pt")
dist.barrier()
dist.destroy_process_group()

"""What each way over ranks costs in memory and bytes, in sizes of the model; a table for docs/many-ranks.md.

    torchrun --standalone --nproc-per-node=2 tools/ways_over_ranks.py

A rank's resident memory above what it was before the model was built, at its highest over some windows of SGD with
momentum, in which activations are small. Linux only.
"""

from __future__ import annotations

import gc
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from gradaccum import Objective
from gradaccum.measurements.launch import stay_on_this_machine
from gradaccum.measurements.process_memory import ProcessPeak
from gradaccum.measurements.setup import SGD
from gradaccum.measurements.spread import Way, spread, ways

WIDTH, LAYERS, MICRO_BATCH, ACCUM_STEPS, WINDOWS = 1024, 8, 4, 4, 3


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def row(way: Way) -> str:
    """One line of the table, as rank 0 sees it."""
    size = LAYERS * WIDTH * WIDTH * 4
    gc.collect()
    dist.barrier()
    peak = ProcessPeak()
    over_ranks = spread(model(), way.strategy)
    optimizer = torch.optim.SGD(over_ranks.parameters(), lr=1e-3, momentum=0.9)
    objective = Objective(lambda model, batch: model(batch).square().sum(), len)
    accumulator = way.accumulator(over_ranks, optimizer, objective, settings=SGD(lr=1e-3))
    window = [torch.randn(MICRO_BATCH, WIDTH) for _ in range(ACCUM_STEPS)]
    for _ in range(WINDOWS):
        step = accumulator.step(window)
    held = (peak.above() or 0) / size
    sent = [step.reduced_bytes / size, step.gathered_bytes / size]
    return f"| `{way.name}` | {held:.1f} | {step.reductions} | {sent[0]:.1f} | {sent[1]:.1f} |"


def main() -> None:
    torch.set_num_threads(1)
    stay_on_this_machine()
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    all_ways = ways(["ddp", "fsdp2"])
    lines = [row(way) for way in [*all_ways, *all_ways]][len(all_ways) :]  # the first time pays for buffers that stay
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"N = {ACCUM_STEPS}, W = {dist.get_world_size()}, torch {torch.__version__}")
        print("| way | memory of a rank | reductions | reduced | gathered |\n|---|---|---|---|---|")
        print("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

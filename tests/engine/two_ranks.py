"""One of several processes that observe a gradient together; started by a test.

Usage: two_ranks.py RANK WORLD_SIZE STORE OUT
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from torch import distributed, nn

from gradaccum.engine.noise_scale import NoiseScale

CUTS = ([5, 4], [3, 4, 0])
"""The micro-batches of each rank; one has no targets."""
FEATURES = 7


def samples(window: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(window)
    return 0.3 + torch.randn(sum(map(sum, CUTS)), FEATURES, generator=generator, dtype=torch.float64)


def observe(noise: NoiseScale, window: int, rank: int) -> None:
    """What an engine over several ranks would do around one window."""
    everything = samples(window)
    own = everything.split([sum(cut) for cut in CUTS])[rank]
    mean = nn.Parameter(torch.zeros(FEATURES, dtype=torch.float64))
    with noise.watch([mean], micro_batches=len(CUTS[rank])) as note:
        for batch in own.split(CUTS[rank]):
            if len(batch):
                (0.5 * (mean - batch).square().sum() / len(everything)).backward()
                note(len(batch), 1 / len(everything))
    assert mean.grad is not None
    distributed.all_reduce(mean.grad)
    noise.finish(mean.grad.norm(), len(everything))


def main() -> None:
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world_size)
    noise = NoiseScale()
    for window in range(3):
        observe(noise, window, rank)
    Path(sys.argv[4]).write_text(json.dumps([asdict(window) for window in noise.windows()]))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""What observing the noise scale costs: CPU time of whole windows with the observer over that without.

Run from the project's root: `python -m benchmarks.noise_scale`. It writes benchmarks/noise_scale.md.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.timing import interleave
from gradaccum import Accumulator, NoiseScale
from gradaccum.engine.batching import Batch
from gradaccum.workloads.choice import WorkloadChoice
from gradaccum.workloads.workload import Workload

MICRO_BATCHES = 8
ROUNDS = 100
PAGE = Path(__file__).with_name("noise_scale.md")

INTRO = """\
# What observing the noise scale costs

CPU time of one optimizer step at one thread, N = {n} micro-batches, AdamW, with `observer=NoiseScale()` over that
without, in the same rounds: median and quartiles of {rounds} rounds, and the least time of each over the least of the
other, which other programs disturb least. Python {python}, torch {torch}. Made by `python -m benchmarks.noise_scale`.

| workload | micro-batch | gradients | without, ms | ratio (quartiles) | ratio of the least |
|---|---|---|---|---|---|"""


def main() -> None:
    torch.set_num_threads(1)
    text = (
        INTRO.format(n=MICRO_BATCHES, rounds=ROUNDS, python=platform.python_version(), torch=torch.__version__) + "\n"
    )
    for name, micro_batch in (("dictionary", 4), ("dictionary", 16), ("definitions", 8), ("digits", 4), ("digits", 32)):
        text += row(WorkloadChoice(name).load(), micro_batch) + "\n"
    PAGE.write_text(text)
    print(text)


def row(workload: Workload, micro_batch: int, *, rounds: int = ROUNDS) -> str:
    window = micro_batches(workload, micro_batch)
    model = workload.make_model()
    runs = {
        name: partial(steps, accumulator(workload, model, noise), window)
        for name, noise in (("without", None), ("observed", NoiseScale()))
    }
    timed = interleave(runs, windows=1, rounds=rounds)
    observed, without = timed["observed"], timed["without"]
    cells = [workload.name, micro_batch, len(list(model.parameters())), f"{without.median_us / 1000:.2f}"]
    cells += [f"{observed.over(without):.3f}", f"{observed.least_us / without.least_us:.3f}"]
    return f"| {' | '.join(map(str, cells))} |"


def micro_batches(workload: Workload, size: int) -> Sequence[Batch]:
    indices = [list(range(start * size, (start + 1) * size)) for start in range(MICRO_BATCHES)]
    return [workload.collate([workload.train[index] for index in each]) for each in indices]


def steps(accumulator: Accumulator, window: Sequence[Batch]) -> None:
    accumulator.step(window)


def accumulator(workload: Workload, model: nn.Module, noise: NoiseScale | None) -> Accumulator:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return Accumulator(model, optimizer, workload.objective, observer=noise)


if __name__ == "__main__":
    main()

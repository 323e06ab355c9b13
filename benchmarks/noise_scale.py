"""What observing the noise scale costs: CPU time of whole windows with the observer over that without.

Interleaved (A B A B, in turns of who is first), one thread, process time, so that other programs of the machine move
both alike. Prints benchmarks/noise_scale.md. Run: python benchmarks/noise_scale.py > benchmarks/noise_scale.md
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from statistics import median, quantiles
from time import process_time

import torch
from torch import nn

from gradaccum import Accumulator, NoiseScale
from gradaccum.engine.batching import Batch
from gradaccum.workloads.choice import WorkloadChoice
from gradaccum.workloads.workload import Workload

MICRO_BATCHES = 8
ROUNDS = 100

PAGE = """\
# What observing the noise scale costs

CPU time of one optimizer step at one thread, N = {n} micro-batches, AdamW, with `observer=NoiseScale()` over that
without, in the same rounds: median and quartiles of {rounds} rounds, and the least time of each over the least of the
other, which other programs disturb least. Python {python}, torch {torch}. Made by `python benchmarks/noise_scale.py`.

| workload | micro-batch | gradients | without, ms | ratio (quartiles) | ratio of the least |
|---|---|---|---|---|---|"""


def main() -> None:
    torch.set_num_threads(1)
    print(PAGE.format(n=MICRO_BATCHES, rounds=ROUNDS, python=platform.python_version(), torch=torch.__version__))
    for name, micro_batch in (("dictionary", 4), ("dictionary", 16), ("definitions", 8), ("digits", 4), ("digits", 32)):
        print(row(WorkloadChoice(name).load(), micro_batch), flush=True)


def row(workload: Workload, micro_batch: int) -> str:
    window = micro_batches(workload, micro_batch)
    model = workload.make_model()
    plain, observed = (accumulator(workload, model, noise) for noise in (None, NoiseScale()))
    times: dict[Accumulator, list[float]] = {plain: [], observed: []}
    for number in range(ROUNDS + 3):
        for each in (plain, observed) if number % 2 else (observed, plain):
            start = process_time()
            each.step(window)
            times[each].append(process_time() - start)
    with_it, without = times[observed][3:], times[plain][3:]
    low, middle, high = quantiles([one / other for one, other in zip(with_it, without, strict=True)], n=4)
    cells = [workload.name, micro_batch, len(list(model.parameters())), f"{1000 * median(without):.2f}"]
    cells += [f"{middle:.3f} ({low:.3f} to {high:.3f})", f"{min(with_it) / min(without):.3f}"]
    return f"| {' | '.join(map(str, cells))} |"


def micro_batches(workload: Workload, size: int) -> Sequence[Batch]:
    indices = [list(range(start * size, (start + 1) * size)) for start in range(MICRO_BATCHES)]
    return [workload.collate([workload.train[index] for index in each]) for each in indices]


def accumulator(workload: Workload, model: nn.Module, noise: NoiseScale | None) -> Accumulator:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return Accumulator(model, optimizer, workload.objective, observer=noise)


if __name__ == "__main__":
    main()

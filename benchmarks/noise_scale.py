"""What observing the noise scale costs: CPU time of whole windows with the observer over that without.

Interleaved (A B A B, in turns of who is first), one thread, process time, so that other programs of the machine move
both alike. Run: python benchmarks/noise_scale.py
"""

from __future__ import annotations

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
ROUNDS = 40


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'workload':<12} {'micro_batch':>11} {'parameters':>10} {'without, ms':>12} {'ratio':>7}   quartiles")
    for name, micro_batch in (("digits", 4), ("digits", 32), ("dictionary", 4), ("dictionary", 16), ("definitions", 8)):
        report(WorkloadChoice(name).load(), micro_batch)


def report(workload: Workload, micro_batch: int) -> None:
    window = micro_batches(workload, micro_batch)
    model = workload.make_model()
    plain, observed = (accumulator(workload, model, noise) for noise in (None, NoiseScale()))
    times: dict[Accumulator, list[float]] = {plain: [], observed: []}
    for number in range(ROUNDS + 3):
        for each in (plain, observed) if number % 2 else (observed, plain):
            start = process_time()
            each.step(window)
            times[each].append(process_time() - start)
    ratios = [one / other for one, other in zip(times[observed][3:], times[plain][3:], strict=True)]
    low, _, high = quantiles(ratios, n=4)
    tensors = len(list(model.parameters()))
    print(
        f"{workload.name:<12} {micro_batch:>11} {tensors:>10} {1000 * median(times[plain][3:]):>12.2f} "
        f"{median(ratios):>7.3f}   {low:.3f} to {high:.3f}"
    )


def micro_batches(workload: Workload, size: int) -> Sequence[Batch]:
    indices = [list(range(start * size, (start + 1) * size)) for start in range(MICRO_BATCHES)]
    return [workload.collate([workload.train[index] for index in each]) for each in indices]


def accumulator(workload: Workload, model: nn.Module, noise: NoiseScale | None) -> Accumulator:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return Accumulator(model, optimizer, workload.objective, observer=noise)


if __name__ == "__main__":
    main()

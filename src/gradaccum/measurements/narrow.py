"""What bf16 loses when it sums the gradients of many micro-batches, and what a float32 buffer keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gradaccum.engine.accumulator import Accumulator
from gradaccum.engine.batching import Batch, to
from gradaccum.measurements.bench import Bench
from gradaccum.measurements.comparison import Named, wide

MICRO_BATCHES = 512
FULL_BATCH_TIMES = 2.0
"""The float32 buffer's error may be this many times the full batch's: what is left is bf16's own forward pass."""


@dataclass(frozen=True)
class NarrowErrors:
    """Largest error of a bf16 gradient, relative to the largest float64 entry of the same parameter.

    Attributes:
        full_batch: of one pass over everything: bf16's own rounding.
        bf16_sums: of 512 micro-batches, added up in bf16.
        float32_sums: of the same, added up in float32 and rounded once.
    """

    full_batch: float
    bf16_sums: float
    float32_sums: float

    def metrics(self) -> dict[str, float]:
        return {f"bf16_grad_error_{name}": value for name, value in vars(self).items()}

    def finding(self) -> str:
        return (
            f"bf16 over {MICRO_BATCHES} micro-batches: gradients summed in bf16 end {self.bf16_sums:.1%} from the "
            f"float64 truth, in a float32 buffer {self.float32_sums:.1%}; the full batch itself {self.full_batch:.1%}. "
            "Set accum_dtype=torch.float32."
        )

    def failures(self) -> list[str]:
        allowed = FULL_BATCH_TIMES * self.full_batch
        failure = (
            f"bf16: the float32 buffer ends {self.float32_sums:.1%} from the float64 truth, allowed is {allowed:.1%}."
        )
        return [] if self.float32_sums <= allowed else [failure]


def accumulate_in_bf16(bench: Bench) -> NarrowErrors:
    """Gradients of a bf16 model over 512 samples, against the float64 gradient of the same rounded parameters."""
    indices = bench.order(MICRO_BATCHES)
    window = bench.window(indices, [1] * MICRO_BATCHES, torch.bfloat16)
    whole = bench.window(indices, [MICRO_BATCHES], torch.bfloat16)
    exact = bench.model(torch.bfloat16).double()
    truth = _gradient(bench, exact, [to(batch, bench.device, torch.float64) for batch in whole])
    return NarrowErrors(
        full_batch=_error(_gradient(bench, bench.model(torch.bfloat16), whole), truth),
        bf16_sums=_error(_gradient(bench, bench.model(torch.bfloat16), window), truth),
        float32_sums=_error(_gradient(bench, bench.model(torch.bfloat16), window, accum_dtype=torch.float32), truth),
    )


def _gradient(
    bench: Bench, model: nn.Module, window: Sequence[Batch], *, accum_dtype: torch.dtype | None = None
) -> Named:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    Accumulator(model, optimizer, bench.workload.objective, accum_dtype=accum_dtype).step(window)
    return wide((name, parameter.grad) for name, parameter in model.named_parameters())


def _error(found: Named, truth: Named) -> float:
    def of(name: str) -> float:
        size = float(truth[name].abs().max())
        return float((found[name] - truth[name]).abs().max()) / size if size else 0.0

    return max(of(name) for name in truth)

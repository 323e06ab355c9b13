"""The machine's limit: floating-point operations of a micro-batch, and the rate that is reached at best here."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from gradaccum.engine.batching import Batch
from gradaccum.measurements.bench import Bench

MATRIX = {"cpu": 1024, "cuda": 8192}
"""Width of the square matrices: past the caches' influence, and multiplied in some hundredths of a second."""

TRIES = 10

Shape = Sequence[int]


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))  # type: ignore[no-untyped-call]


UNCOUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""The CPU's attention, which torch's counter leaves out: counted here as torch counts that of CUDA."""


def flops_of_micro_batch(bench: Bench, batch: Batch) -> int:
    """Floating-point operations of one forward and backward pass, as torch counts them: matrix products and the like.

    A multiplication and an addition are two operations; element-wise work is not counted.
    """
    model = bench.model()
    with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
        torch.autograd.backward(list(bench.workload.objective.loss_sums(model, batch)))
    return int(counter.get_total_flops())


def matmul_peak_flops_per_sec(device: torch.device) -> float:
    """The best rate of a large float32 matrix product here, with the threads that torch now has."""
    width = MATRIX[device.type]
    left, right = (torch.randn(width, width, device=device) for _ in range(2))
    best = min(_seconds(left, right) for _ in range(TRIES))
    return float(2 * width**3 / best)


def _seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    start = perf_counter()
    float((left @ right)[0, 0])  # reading a value waits for the device
    return perf_counter() - start

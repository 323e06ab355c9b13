"""The memory of one window: predicted on fake tensors, tallied on real ones, and seen from outside the process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.optim import Optimizer

from gradaccum.engine.accumulator import Accumulator
from gradaccum.engine.batching import Batch
from gradaccum.engine.objective import Objective
from gradaccum.engine.precision import LEAST_SCALE, Precision
from gradaccum.engine.structure import map_tensors, tensors_of
from gradaccum.errors import ConfigError
from gradaccum.measurements.bench import Bench, make_optimizer
from gradaccum.measurements.process_memory import DevicePeak, ProcessPeak, give_freed_memory_back
from gradaccum.measurements.setup import SGD, AdamW, Setup
from gradaccum.measurements.tally import CUDA_BLOCK, OneForEveryNumber, Peak, Tally

WINDOWS = 2
"""The first window makes the optimizer's state, the second runs beside it: no later one needs more."""

MOST_REAL_SAMPLES = 16384
"""A larger batch repeats these; it is predicted from its shape alone."""


@dataclass(frozen=True)
class Window:
    """Which window: its micro-batches' size and number, the optimizer that steps, the precision of its forward pass."""

    micro_batch: int
    accum_steps: int
    settings: SGD | AdamW
    precision: Precision = "float32"


@dataclass(frozen=True)
class Seen:
    """What a real window took: by the tally, and above the baseline of its process or device; null where unknown."""

    tally: Peak
    process_bytes: int | None
    device_bytes: int | None


def predict(bench: Bench, window: Window, *, device: str | None = None) -> Peak:
    """Peak memory of a window, without running it: its operations on tensors that have a shape, but no data.

    Args:
        device: where it would run, by default the bench's. For one that is not here, the operations are this one's, and
            sizes are rounded as the other's allocator rounds them. What kernels take for themselves is not known.

    Raises:
        ConfigError: a tensor's size depends on values.
    """
    batch = sample_batch(bench, window.micro_batch, enlarge=shape_only)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), OneForEveryNumber():  # type: ignore[no-untyped-call]
            return _tallied(bench, batch, window, block=_block(device or bench.device.type))
    except DynamicOutputShapeException as error:
        raise ConfigError(
            f"the memory of workload {bench.workload.name!r} cannot be predicted, because the size of a tensor depends "
            f"on the values of others ({error}). Avoid that (multiply by a mask instead of indexing by it), or find "
            "what fits by running: gradaccum.fit_micro_batch."
        ) from error


def gradient_bytes(bench: Bench) -> int:
    """Of one gradient: what is frozen, and buffers, have none."""
    with FakeTensorMode():
        parameters = [each for each in bench.workload.make_model().parameters() if each.requires_grad]
        return sum(each.numel() * each.element_size() for each in parameters)


def observe(setup: Setup, window: Window) -> Seen:
    """The same window for real; call it in a process of its own, whose peak is then the window's."""
    bench = Bench.prepare(setup)
    give_freed_memory_back()  # before anything is allocated that is looked at later
    batch = sample_batch(bench, window.micro_batch, enlarge=repeated)
    _run(bench, map_tensors(batch, lambda tensor: tensor[:1]), replace(window, accum_steps=1))
    gc.collect()  # or the baseline holds what the first window left in cycles
    process, device = ProcessPeak(), DevicePeak(bench.device)
    _run(bench, batch, window)
    seen = process.above(), device.above()
    return Seen(_tallied(bench, batch, window, block=_block(bench.device.type)), *seen)


def sample_batch(bench: Bench, samples: int, *, enlarge: Callable[[Tensor, int], Tensor]) -> Batch:
    """Training samples as one batch; those beyond `MOST_REAL_SAMPLES` are what `enlarge` makes of each tensor."""
    batch = bench.micro_batch(bench.order(min(samples, MOST_REAL_SAMPLES)))
    return batch if samples <= MOST_REAL_SAMPLES else map_tensors(batch, lambda tensor: enlarge(tensor, samples))


def shape_only(tensor: Tensor, samples: int) -> Tensor:
    return tensor.new_empty((samples, *tensor.shape[1:]), device="meta")


def repeated(tensor: Tensor, samples: int) -> Tensor:
    return tensor[torch.arange(samples, device=tensor.device) % len(tensor)]


def _tallied(bench: Bench, batch: Batch, window: Window, *, block: int) -> Peak:
    with Tally(block) as tally:
        _run(bench, batch, window, tally=tally)
        peak: Peak = tally.peak()
    return peak


def _run(bench: Bench, batch: Batch, window: Window, *, tally: Tally | None = None) -> None:
    """Some windows of copies of the batch, with everything that training needs made anew."""
    model = on_device(bench.workload.make_model().train(), bench.device)
    optimizer = make_optimizer(model, window.settings)
    micro_batches = [map_tensors(batch, lambda each: _copy(each, bench.device)) for _ in range(window.accum_steps)]
    objective = bench.workload.objective
    if tally:
        tally.label([*model.parameters(), *model.buffers()], "parameters")
        tally.label((tensor for each in micro_batches for tensor in tensors_of(each)), "inputs")
        tally.reset_peak()
        objective = _labelling(objective, optimizer, tally)
    accumulator = Accumulator(
        model, optimizer, objective, clip_norm=window.settings.clip_norm, precision=window.precision
    )
    if accumulator.loss_scale:
        accumulator.loss_scale.value = LEAST_SCALE  # a step skipped on overflow would make no optimizer state
    for _ in range(WINDOWS):
        accumulator.step(micro_batches)


def on_device(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with its tensors on the device; `model.to` fails on fake tensors that something refers to weakly."""
    moved: dict[Tensor, Any] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in moved:
                moved[parameter] = nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
            setattr(module, name, moved[parameter])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, moved.setdefault(buffer, buffer.to(device)))
    return model


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return empty if tensor.is_meta else empty.copy_(tensor)


def _labelling(objective: Objective, optimizer: Optimizer, tally: Tally) -> Objective:
    """The objective, telling the tally what is alive: after a forward pass activations, around a step state.

    Counts are taken for 1: no tensor's size depends on them, and fake tensors have no values to count.
    """

    def loss_sum(model: nn.Module, batch: Batch) -> Any:
        tally.label(_gradients(optimizer), "gradients")
        loss = objective.loss_sum(model, batch)
        tally.relabel("temporaries", "activations")
        return loss

    def count(batch: Batch) -> Any:
        del batch
        return 1 if objective.weights is None else dict.fromkeys(objective.weights, 1)

    optimizer.register_step_pre_hook(lambda *_: tally.label(_gradients(optimizer), "gradients"))
    optimizer.register_step_post_hook(lambda *_: tally.label(_state(optimizer), "optimizer_state"))
    return Objective(loss_sum, count, objective.weights)


def _gradients(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from (parameter.grad for parameter in group["params"] if parameter.grad is not None)


def _state(optimizer: Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _block(device: str) -> int:
    return CUDA_BLOCK if device == "cuda" else 1

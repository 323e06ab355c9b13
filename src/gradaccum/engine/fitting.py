"""The micro-batch that fits in memory, found by running: before training, or while it runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradaccum.engine.batching import Batch, BatchPlan, positive_int, require_samples, split
from gradaccum.engine.buffers import Buffers
from gradaccum.engine.random_state import random_state, set_random_state
from gradaccum.engine.step_result import StepResult
from gradaccum.errors import BatchError, ConfigError

if TYPE_CHECKING:
    from gradaccum.engine.accumulator import Accumulator

OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc", "ALLOC_FAILED")
"""How the errors of allocators that raise a plain RuntimeError read."""


class Fitting:
    """Steps on whole batches, cut as finely as memory asks; what was learnt holds for the batches that follow.

    Attributes:
        micro_batch: the largest that is tried; None while no batch was too large.
    """

    def __init__(self) -> None:
        self.micro_batch: int | None = None

    def step(self, accumulator: Accumulator, batch: Batch) -> StepResult:
        """One optimizer step; on out-of-memory the same window again, cut in halves.

        Each try starts from the same random state and buffers, so that gradients and parameters are to the last bit
        those of a run that had used the smaller micro-batch from the start.

        Raises:
            RuntimeError: torch's own, when a micro-batch of 1 does not fit, or when memory runs out in the optimizer's
                step, which no smaller micro-batch can help.
        """
        _refuse_ranks("step_batch(batch, 'auto')")
        samples = require_samples(batch)
        size = min(self.micro_batch or samples, samples)
        while (result := _try(accumulator, batch, size)) is None:
            self.micro_batch = size = (size + 1) // 2
        return result


def fit_micro_batch(accumulator: Accumulator, batch: Batch, *, world_size: int = 1) -> BatchPlan:
    """The largest micro-batch that fits, found by running windows of twice as large ones until memory runs out.

    Every trial is a whole optimizer step, and is undone: model, optimizer, scheduler, gradients and random state are as
    before. What is undone is kept in host memory meanwhile, which on the CPU makes the answer cautious.

    Args:
        accumulator: as it will train.
        batch: one rank's samples of an effective batch.
        world_size: ranks that will train; run this before they are started.

    Returns:
        The plan that keeps the effective batch, `accum_steps` making up for what the micro-batch is smaller. Its
        micro-batch divides the batch: of the divisors the largest of each doubling is tried. Those too small for the
        model (batch norm takes no single sample) are passed over.

    Raises:
        BatchError: not even the smallest fits.
    """
    _refuse_ranks("fit_micro_batch")
    world_size = positive_int("world_size", world_size)
    samples = require_samples(batch)
    fitting = 0
    for size in _doublings(samples):
        try:
            with _undone(accumulator):
                fits = _runs(accumulator, split(batch, size)[:2])
        except ValueError:  # such as batch norm's, of a single sample
            if fitting or size == samples:
                raise
            continue
        if not fits:
            break
        fitting = size
    if not fitting:
        raise BatchError(
            f"not even a micro-batch of {size} fits in memory beside the model, its gradients and the optimizer's "
            "state. Use a smaller model, an optimizer with less state, or a device with more memory."
        )
    return BatchPlan(samples * world_size, fitting, world_size)


def _doublings(samples: int) -> list[int]:
    """Of the divisors the largest of each doubling."""
    divisors = (size for size in range(1, samples + 1) if samples % size == 0)
    return sorted({size.bit_length(): size for size in divisors}.values())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's or the host's memory did not suffice."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
    )


def _try(accumulator: Accumulator, batch: Batch, size: int) -> StepResult | None:
    """None where memory ran out before the optimizer's step began, with everything as it was."""
    stepping: list[bool] = []
    noted = accumulator.optimizer.register_step_pre_hook(lambda *_: stepping.append(True))
    buffers = Buffers(accumulator.model.modules())
    random = random_state()
    try:
        return accumulator.step(split(batch, size))
    except (RuntimeError, MemoryError) as error:
        if stepping or size == 1 or not is_out_of_memory(error):
            raise
    finally:
        noted.remove()
    _free()  # after the exception is gone, and with it the frames that hold the window's tensors
    buffers.restore()
    set_random_state(random)
    return None


def _runs(accumulator: Accumulator, window: Sequence[Batch]) -> bool:
    try:
        accumulator.step(window)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


@contextmanager
def _undone(accumulator: Accumulator) -> Iterator[None]:
    """Put back everything that the steps inside change; neither `after_step` nor the observer learns of them."""
    model, stepped = accumulator.model, accumulator.optimizer.param_groups
    parameters = list(dict.fromkeys(chain(model.parameters(), *(group["params"] for group in stepped))))
    held, buffers, state = _on_host(parameters), Buffers(model.modules(), _on_host), _on_host(accumulator.state_dict())
    with ExitStack() as undo:  # whatever one of these raises, the others are done, the last one first
        undo.callback(setattr, accumulator, "after_step", accumulator.after_step)
        undo.callback(setattr, accumulator, "observer", accumulator.observer)
        undo.callback(accumulator.load_state_dict, state)
        for parameter in parameters:
            undo.callback(setattr, parameter, "grad", parameter.grad)
        undo.callback(_restore, parameters, held)
        undo.callback(buffers.restore)
        undo.callback(_free)
        accumulator.after_step, accumulator.observer = (), None
        yield


def _on_host(state: Any) -> Any:
    """A copy of nested state, its tensors in host memory."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: _on_host(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_on_host(value) for value in state)
    return deepcopy(state)


@torch.no_grad()
def _restore(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _refuse_ranks(what: str) -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        ranks = torch.distributed.get_world_size()
        if ranks > 1:
            raise ConfigError(
                f"{what} runs in a group of {ranks} ranks: where memory runs out on one of them, the others would wait "
                "for it in a reduction. Run fit_micro_batch in one process before, and give every rank its micro_batch."
            )

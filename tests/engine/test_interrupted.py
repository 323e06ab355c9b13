from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from gradaccum import Accumulator, Objective, master_weights
from gradaccum.engine import gradients
from tests.engine.reference import (
    CLASSIFICATION,
    accumulated,
    assert_same,
    gradient_of,
    make_batch,
    make_model,
    mean_loss,
    same_state,
    snapshot,
    window_of,
)

ERRORS = pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError, ValueError])


class Fuse:
    """An objective that raises where it is told to."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.where = ""
        self.micro_batch = 0
        self._seen = 0

    def objective(self) -> Objective:
        return Objective(self.loss_sum, self.count)

    def count(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self._seen = 0
        self._burn("count")
        return CLASSIFICATION.count(batch)

    def loss_sum(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self._seen == self.micro_batch:
            self._burn("forward")
        loss: Tensor = CLASSIFICATION.loss_sum(model, batch)
        if self._seen == self.micro_batch and self.where == "backward":
            loss.register_hook(lambda _: self._burn("backward"))
        self._seen += 1
        return loss

    def _burn(self, where: str) -> None:
        if self.where == where:
            raise self.error("interrupted")


@ERRORS
@pytest.mark.parametrize("micro_batch", [0, 2])
@pytest.mark.parametrize("where", ["count", "forward", "backward"])
def test_an_interrupted_window_changes_nothing_and_the_next_is_clean(
    where: str, micro_batch: int, error: type[BaseException]
) -> None:
    fuse, model = Fuse(error), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = StepLR(optimizer, 1)
    accumulator = Accumulator(model, optimizer, fuse.objective(), scheduler=scheduler, clip_norm=0.1)
    accumulator.step(window_of([5, 4, 3]))
    before = snapshot(model, optimizer, scheduler)

    fuse.where, fuse.micro_batch = where, micro_batch
    with pytest.raises(error, match="interrupted"):
        accumulator.step(window_of([5, 4, 3]))
    assert same_state(snapshot(model, optimizer, scheduler), before)
    assert accumulated(model) == []
    assert accumulator.steps == 1

    fuse.where = ""
    accumulator.clip_norm = None
    reference = gradient_of(mean_loss(model, make_batch()), model)
    assert accumulator.step(window_of([5, 4, 3])).applied
    assert_same(accumulated(model), reference)


@ERRORS
def test_an_interruption_between_unscale_and_step_leaves_the_loss_scale(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    model = make_model(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, CLASSIFICATION, precision="fp16", clip_norm=0.1)
    accumulator.step(window_of([5, 4, 3], torch.float32))
    assert accumulator.loss_scale is not None
    before, scale = snapshot(model, optimizer), asdict(accumulator.loss_scale)

    def interrupt(*_: object) -> None:
        raise error("interrupted")

    with monkeypatch.context() as patched:
        patched.setattr(gradients, "clip", interrupt)
        with pytest.raises(error, match="interrupted"):
            accumulator.step(window_of([5, 4, 3], torch.float32))
    assert same_state(snapshot(model, optimizer), before)
    assert asdict(accumulator.loss_scale) == scale
    assert accumulated(model) == []
    assert accumulator.step(window_of([5, 4, 3], torch.float32)).applied


def bf16_buffers(model: nn.Module, objective: Objective) -> Accumulator:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Accumulator(model, optimizer, objective, accum_dtype=torch.float32)


def bf16_masters(model: nn.Module, objective: Objective) -> Accumulator:
    masters = master_weights(model)
    return Accumulator(model, torch.optim.SGD(masters, lr=0.1), objective, master_weights=masters)


@pytest.mark.parametrize("make", [bf16_buffers, bf16_masters])
def test_an_interrupted_window_leaves_nothing_in_the_wide_sums(
    make: Callable[[nn.Module, Objective], Accumulator],
) -> None:
    """The window after an interrupted one takes the very step of one that was never interrupted."""
    fuse = Fuse(ValueError)
    interrupted, calm = make_model(torch.bfloat16), make_model(torch.bfloat16)
    accumulator = make(interrupted, fuse.objective())
    fuse.where, fuse.micro_batch = "forward", 2
    with pytest.raises(ValueError, match="interrupted"):
        accumulator.step(window_of([5, 4, 3], torch.bfloat16))
    fuse.where = ""
    accumulator.step(window_of([5, 4, 3], torch.bfloat16))
    make(calm, CLASSIFICATION).step(window_of([5, 4, 3], torch.bfloat16))
    assert same_state(snapshot(interrupted), snapshot(calm))

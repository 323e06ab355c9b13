"""Random cuts and masks under loops of all sorts: a right one is never blamed, a wrong one never called equivalent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from gradaccum import diagnose
from gradaccum.measurements.diagnose import Diagnosis
from tests.measurements.loops import CLASSIFICATION, FEATURES, SAMPLES, Window, network

EXAMPLES = 2


def targets_in(window: Window) -> int:
    return sum(int((labels != -100).sum()) for _, labels in window)


def share(loss_sum: Tensor, total: int, piece: tuple[Tensor, Tensor], window: Window) -> Tensor:
    """What a right loop differentiates of a micro-batch."""
    return loss_sum / total


def nothing(model: nn.Module, *_: object) -> None:
    """Between, before or after, a right loop has nothing to do."""


@dataclass(frozen=True)
class Loop:
    """A hand-written loop, right as it stands; each field may be put wrong.

    Attributes:
        weigh: a micro-batch's loss sum to what is differentiated.
        clears: when gradients are cleared: `before` or `after` the window, before `each` micro-batch, or `never`.
        between: done to the gradients after every backward pass.
        finish: done to the gradients before the step.
        steps: how often the optimizer steps.
        order: of the micro-batches.
        mode: the model's.
        label_smoothing: of the loss.
    """

    weigh: Callable[[Tensor, int, tuple[Tensor, Tensor], Window], Tensor] = share
    clears: str = "before"
    between: Callable[[nn.Module, Window], object] = nothing
    finish: Callable[[nn.Module, Window], object] = nothing
    steps: int = 1
    order: Callable[[Window], Window] = list
    training: bool = True
    label_smoothing: float = 0.0

    def __call__(self, model: nn.Module, optimizer: Optimizer, window: Window) -> None:
        model.train(self.training)
        if self.clears == "before":
            optimizer.zero_grad()
        for piece in self.order(window):
            if self.clears == "each":
                optimizer.zero_grad()
            inputs, labels = piece
            loss_sum = F.cross_entropy(model(inputs), labels, reduction="sum", label_smoothing=self.label_smoothing)
            self.weigh(loss_sum, targets_in(window), piece, window).backward()
            self.between(model, window)
        self.finish(model, window)
        for _ in range(self.steps):
            optimizer.step()
        if self.clears == "after":
            optimizer.zero_grad()


def by_mean(loss_sum: Tensor, total: int, piece: tuple[Tensor, Tensor], window: Window) -> Tensor:
    count = targets_in([piece])
    return loss_sum / count * (count / total)


def clipped(norm: float) -> Callable[[nn.Module, Window], object]:
    return lambda model, _: clip_grad_norm_(model.parameters(), norm)


def scaled(factor: Callable[[Window], float]) -> Callable[[nn.Module, Window], object]:
    def scale(model: nn.Module, window: Window) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= factor(window)

    return scale


RIGHT = {
    "loss sum over all targets": Loop(),
    "mean times its share": Loop(weigh=by_mean),
    "cleared after the step": Loop(clears="after"),
    "another order": Loop(order=lambda window: window[::-1]),
    "divided at the end": Loop(weigh=lambda loss, *_: loss, finish=scaled(lambda window: 1 / targets_in(window))),
    "clipped": Loop(finish=clipped(0.05)),
    "clipped, never reached": Loop(finish=clipped(1e3)),
}


def of_window(factor: Callable[[int], float]) -> Callable[..., Tensor]:
    """A right share, times a function of the number of micro-batches."""
    return lambda loss_sum, total, piece, window: loss_sum / total * factor(len(window))


def over_own(loss_sum: Tensor, total: int, piece: tuple[Tensor, Tensor], window: Window) -> Tensor:
    return loss_sum / targets_in([piece])


WRONG = {
    "not divided": Loop(weigh=over_own),
    "times N": Loop(weigh=of_window(lambda n: n)),
    "times N squared": Loop(weigh=of_window(lambda n: n**2)),
    "divided twice": Loop(weigh=of_window(lambda n: 1 / n)),
    "divided once more at the end": Loop(finish=scaled(lambda window: 1 / len(window))),
    "half of it": Loop(weigh=of_window(lambda n: 0.5)),
    "turned round": Loop(weigh=of_window(lambda n: -1)),
    "sum not divided": Loop(weigh=lambda loss_sum, *_: loss_sum),
    "not divided, then clipped": Loop(weigh=over_own, finish=clipped(0.05)),
    "times N, then clipped": Loop(weigh=of_window(lambda n: n), finish=clipped(0.05)),
    "clipped after every micro-batch": Loop(between=clipped(0.05)),
    "clipped by value": Loop(finish=lambda model, _: clip_grad_value_(model.parameters(), 0.01)),
    "cleared before each micro-batch": Loop(clears="each"),
    "never cleared": Loop(clears="never"),
    "never cleared, clipped": Loop(clears="never", finish=clipped(0.05)),
    "never steps": Loop(steps=0),
    "steps twice": Loop(steps=2),
    "leaves out the first": Loop(order=lambda window: window[1:]),
    "takes the last twice": Loop(order=lambda window: [*window, window[-1]]),
    "smoothed labels": Loop(label_smoothing=0.1),
    "weight decay by hand": Loop(finish=lambda model, _: [p.grad.add_(p, alpha=0.1) for p in model.parameters()]),
}


@st.composite
def cuts(draw: st.DrawFn) -> list[int]:
    """Two to five micro-batches of 12 samples."""
    ends = draw(st.lists(st.integers(1, SAMPLES - 1), min_size=1, max_size=4, unique=True).map(sorted))
    return [end - start for start, end in zip([0, *ends], [*ends, SAMPLES], strict=True)]


def masked_batch(cut: Sequence[int], masked: Sequence[bool], seed: int) -> tuple[Tensor, Tensor]:
    """Every micro-batch keeps a target, its first sample's."""
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = (
        torch.randn(SAMPLES, FEATURES, generator=generator),
        torch.randint(4, (SAMPLES,), generator=generator),
    )
    mask = torch.tensor(masked)
    mask[[sum(cut[:index]) for index in range(len(cut))]] = False
    return inputs, torch.where(mask, -100, labels)


def diagnosed(loop: Any, cut: Sequence[int], masked: Sequence[bool], seed: int, *layers: nn.Module) -> Diagnosis:
    batch = masked_batch(cut, masked, seed)
    return diagnose(lambda: network(*layers), CLASSIFICATION, batch, cuts=[cut], step=loop, seed=seed)


CASES = given(cut=cuts(), masked=st.lists(st.booleans(), min_size=SAMPLES, max_size=SAMPLES), seed=st.integers(0, 99))
FEW = settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)


@pytest.mark.parametrize("loop", RIGHT.values(), ids=RIGHT)
@FEW
@CASES
def test_a_right_loop_is_equivalent_whatever_the_cut(loop: Loop, cut: list[int], masked: list[bool], seed: int) -> None:
    found = diagnosed(loop, cut, masked, seed)
    assert found.equivalent, found.causes
    assert [cause.kind for cause in found.causes] == ["numerics"]


@pytest.mark.parametrize("loop", WRONG.values(), ids=WRONG)
@FEW
@CASES
def test_a_wrong_loop_is_never_equivalent_and_alone_to_blame(
    loop: Loop, cut: list[int], masked: list[bool], seed: int
) -> None:
    found = diagnosed(loop, cut, masked, seed)
    assert not found.equivalent
    assert [cause.kind for cause in found.causes] == ["loop"]
    assert found.causes[0].where == (str(cut),)


@FEW
@CASES
def test_a_mean_of_means_is_wrong_where_counts_differ(cut: list[int], masked: list[bool], seed: int) -> None:
    batch = masked_batch(cut, masked, seed)
    counts = {int((labels != -100).sum()) for labels in batch[1].split(cut)}
    assume(len(counts) > 1)
    mean_of_means = Loop(weigh=lambda loss_sum, total, piece, window: loss_sum / targets_in([piece]) / len(window))
    found = diagnosed(mean_of_means, cut, masked, seed)
    assert not found.equivalent
    assert "a mean of means" in found.causes[0].finding


@FEW
@CASES
def test_weighing_by_samples_is_wrong_where_targets_are_masked(cut: list[int], masked: list[bool], seed: int) -> None:
    batch = masked_batch(cut, masked, seed)
    shares = {int((labels != -100).sum()) / len(labels) for labels in batch[1].split(cut)}
    assume(len(shares) > 1 and len(set(cut)) > 1)
    by_samples = Loop(
        weigh=lambda loss, total, piece, window: over_own(loss, total, piece, window) * len(piece[1]) / SAMPLES
    )
    found = diagnosed(by_samples, cut, masked, seed)
    assert not found.equivalent
    assert "samples, not by its" in found.causes[0].finding


@FEW
@CASES
def test_dropout_is_no_excuse_for_evaluation_mode(cut: list[int], masked: list[bool], seed: int) -> None:
    assert diagnosed(Loop(), cut, masked, seed, nn.Dropout(0.5)).equivalent
    found = diagnosed(replace(Loop(), training=False), cut, masked, seed, nn.Dropout(0.5))
    assert not found.equivalent
    assert any("runs in evaluation mode" in cause.finding for cause in found.causes if cause.kind == "loop")

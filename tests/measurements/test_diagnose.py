from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from gradaccum import BatchError
from gradaccum.measurements.diagnose import default_cuts
from gradaccum.measurements.subject import UnjudgedError
from tests.measurements.loops import (
    EVEN,
    FEATURES,
    SAMPLES,
    UNEVEN,
    Step,
    Window,
    batch,
    loop,
    run,
)


def test_the_engine_is_equivalent_and_what_differs_is_rounding() -> None:
    found = run()
    assert found.equivalent
    assert [cause.kind for cause in found.causes] == ["numerics"]
    assert all(cut.sharp.grad_rel_diff < 1e-14 and not cut.mistake for cut in found.cuts)


def test_a_right_loop_of_ones_own_is_equivalent() -> None:
    assert run(step=loop(lambda mean, samples, _: mean * samples / SAMPLES)).equivalent


@pytest.mark.parametrize(
    ("step", "cut", "mistake", "norm_ratio"),
    [
        (loop(lambda mean, _, n: mean), EVEN, "not divided by the 3 accumulation steps", 3),
        (loop(lambda mean, _, n: mean), UNEVEN, "not divided by the 3 accumulation steps", None),
        (loop(lambda mean, samples, n: mean * samples * n / SAMPLES), UNEVEN, "not divided by the 3 accum", 3),
        (loop(lambda mean, _, n: mean / n**2), EVEN, "divided twice by the 3 accumulation steps", 1 / 3),
        (loop(lambda mean, _, n: mean / n**2), UNEVEN, "divided twice by the 3 accumulation steps", None),
        (loop(lambda mean, _, n: mean / n), UNEVEN, "a mean of means.*with 7, 3, 2 targets", None),
        (loop(lambda mean, samples, _: mean * samples), UNEVEN, "the loss sum is not divided by the targets", 12),
        (loop(lambda mean, _, n: mean / n, clear_each=True), UNEVEN, "only the last micro-batch's gradient", None),
        (loop(lambda mean, _, n: mean / n, step_each=True), EVEN, "stepped 3 times in one window", None),
        (
            loop(lambda mean, _, n: mean / 4),
            EVEN,
            "0.75 times the right gradient: divided by 4, perhaps, where the window has 3",
            0.75,
        ),
        (loop(lambda mean, _, n: mean / 4), UNEVEN, "0.75 times a mean of means: divided by 4, perhaps, where", None),
        (loop(lambda mean, s, n: mean * s / SAMPLES * (1 + (s == 7))), UNEVEN, "the gradient points elsewhere", None),
        (lambda model, optimizer, window: None, EVEN, "stepped 0 times in one window", None),
    ],
)
def test_a_wrong_loop_is_told_its_mistake(step: Step, cut: tuple[int, ...], mistake: str, norm_ratio: float) -> None:
    found = run(cuts=[cut], step=step)
    assert not found.equivalent
    assert [cause.kind for cause in found.causes] == ["loop"]
    assert re.search(mistake, found.causes[0].finding)
    assert "clip" not in found.causes[0].finding  # as the loop has none
    if norm_ratio is not None:
        assert found.cuts[0].sharp.norm_ratio == pytest.approx(norm_ratio)
        assert {round(each.norm_ratio, 9) for each in found.cuts[0].parameters} == {round(norm_ratio, 9)}


def test_a_mean_of_means_passes_an_equal_cut_only() -> None:
    found = run(step=loop(lambda mean, _, n: mean / n))
    assert [cut.equivalent for cut in found.cuts] == [True, False]


def test_a_loop_that_turns_a_masked_micro_batch_into_nan_is_told_so() -> None:
    inputs, labels = batch()
    labels[:4] = -100

    def step(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
        optimizer.zero_grad()
        for piece, targets in window:
            mask = (targets != -100).double()
            losses = F.cross_entropy(model(piece), targets.clamp(min=0), reduction="none")
            ((losses * mask).sum() / mask.sum() / len(window)).backward()
        optimizer.step()

    found = run(cuts=[EVEN], step=step, data=(inputs, labels))
    assert "not finite; a micro-batch without targets" in found.causes[0].finding
    assert run(cuts=[EVEN], data=(inputs, labels)).equivalent


@pytest.mark.parametrize("told", [torch.tensor(7.0), 7.0])
def test_a_loop_that_reports_another_loss_is_not_equivalent(told: Any) -> None:
    def step(model: nn.Module, optimizer: Optimizer, window: Window) -> Any:
        loop(lambda mean, samples, _: mean * samples / SAMPLES)(model, optimizer, window)
        return told

    found = run(step=step)
    assert not found.equivalent
    assert "the loss differs" in found.causes[0].finding


def test_a_loop_that_reports_many_losses_is_not_judged() -> None:
    with pytest.raises(UnjudgedError, match=r"returned a tensor of shape \(3,\)"):
        run(step=lambda *_: torch.ones(3))


def test_what_a_loop_does_to_the_learning_rate_between_windows_is_its_own_affair() -> None:
    right = loop(lambda mean, samples, _: mean * samples / SAMPLES)

    def step(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
        right(model, optimizer, window)
        optimizer.param_groups[0]["lr"] *= 3

    assert run(step=step).equivalent


@pytest.mark.parametrize("samples", range(2, 40))
def test_the_default_cuts_are_cuts_and_one_is_uneven(samples: int) -> None:
    cuts = default_cuts(samples)
    assert all(sum(cut) == samples and len(cut) > 1 and 0 not in cut for cut in cuts)
    assert samples < 3 or any(len(set(cut)) > 1 for cut in cuts)
    assert samples < 4 or all(min(cut) > 1 or max(cut) > 1 for cut in cuts)


def test_a_cut_of_one_micro_batch_would_let_any_loop_pass_and_is_refused() -> None:
    with pytest.raises(BatchError, match=r"the cut \[12\] cuts nothing"):
        run(cuts=[EVEN, (12,)])


def test_one_sample_cannot_be_cut() -> None:
    with pytest.raises(BatchError, match="at least two samples"):
        run(data=(torch.ones(1, FEATURES), torch.ones(1).long()))


def test_a_loop_that_hands_its_last_backward_over_as_a_closure_is_seen_whole() -> None:
    def step(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
        *before, (inputs, labels) = window
        optimizer.zero_grad()
        for piece, targets in before:
            (F.cross_entropy(model(piece), targets, reduction="sum") / SAMPLES).backward()

        def closure() -> Tensor:
            loss = F.cross_entropy(model(inputs), labels, reduction="sum") / SAMPLES
            loss.backward()
            return loss

        optimizer.step(closure)

    assert run(step=step).equivalent

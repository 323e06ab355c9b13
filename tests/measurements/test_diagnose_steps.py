"""What a loop does to parameters, precision and clips, and what a right loop may do without being blamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from gradaccum import Objective, diagnose
from gradaccum.measurements.diagnose import Diagnosis
from tests.measurements.loops import SAMPLES, Step, Window, batch, network, run

CUT = (4, 4, 4)


def share(model: nn.Module, piece: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(piece[0]), piece[1], reduction="sum") / SAMPLES


def right(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
    optimizer.zero_grad()
    for piece in window:
        share(model, piece).backward()
    optimizer.step()


def judged(step: Step, *middle: Callable[[], nn.Module], **options: Any) -> Diagnosis:
    return run(*middle, cuts=[CUT], step=step, **options)


def told(found: Diagnosis) -> str:
    return " ".join(cause.finding for cause in found.causes)


def filled(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
    right(model, optimizer, window)
    for parameter in model.parameters():
        parameter.data.fill_(7.0)


def put_back(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    right(model, optimizer, window)
    model.load_state_dict(before)


def at_rate(rate: Callable[[Window], float]) -> Step:
    def step(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
        optimizer.param_groups[0]["lr"] = rate(window)
        right(model, optimizer, window)

    return step


def scheduled_each(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
    scheduler = ExponentialLR(optimizer, 0.5)
    optimizer.zero_grad()
    for piece in window:
        share(model, piece).backward()
        scheduler.step()
    optimizer.step()


def applied_twice(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
    right(model, optimizer, window)
    for parameter in model.parameters():
        parameter.data -= 0.01 * parameter.grad


def two_optimizers(model: Any, optimizer: Optimizer, window: Window) -> None:
    head = SGD(model[-1].parameters(), lr=0.1)
    right(model, optimizer, window)
    head.step()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize(
    ("step", "mistake"),
    [
        (filled, "changes the parameters beside the optimizer's one step"),
        (put_back, "the parameters end where they began"),
        (at_rate(lambda _: 0.0), "a learning rate of 0, where the loop was given 0.01"),
        (at_rate(lambda window: 0.01 * len(window)), "a learning rate of 0.03, where"),
        (scheduled_each, "a learning rate of 0.00125, where"),
        (applied_twice, "they move 2 times as far"),
        (two_optimizers, "changes the parameters beside"),
    ],
)
def test_what_becomes_of_the_parameters_is_judged(step: Step, mistake: str) -> None:
    found = judged(step)
    assert not found.equivalent
    assert not found.cuts[0].verdict.equivalent  # float64 alone tells
    assert mistake in told(found)


def test_a_schedule_that_counts_its_own_calls_is_the_loops_affair() -> None:
    calls: list[int] = []

    def warmed_up(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
        calls.append(1)
        at_rate(lambda _: 1e-4 * len(calls))(model, optimizer, window)

    assert judged(warmed_up).equivalent


def rounded_in_float32(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
    optimizer.zero_grad()
    for piece in window:
        share(model, piece).backward()
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.grad.dtype == torch.float32:
                parameter.grad = parameter.grad.bfloat16().float()
    optimizer.step()


def test_a_mistake_that_only_float32_shows_is_no_kink() -> None:
    found = judged(rounded_in_float32)
    assert not found.equivalent
    assert "in float32 the gradient differs" in told(found)
    assert "at other parameters too" in told(found)


def in_bfloat16(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
    optimizer.zero_grad()
    for piece in window:
        with torch.autocast("cpu", torch.bfloat16):
            loss = share(model, piece)
        loss.backward()
    optimizer.step()


def test_a_right_loop_in_a_lower_precision_is_told_its_rounding() -> None:
    found = judged(in_bfloat16)
    assert found.equivalent
    assert [cause.kind for cause in found.causes] == ["numerics"]
    assert "lower precision (bfloat16)" in told(found)


def clipping(limit: float, *, each: bool = False, kind: float = 2.0, after: float = 1.0) -> Step:
    """Right, but where `each` micro-batch is clipped or gradients are divided `after` the clip."""

    def step(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
        optimizer.zero_grad()
        for piece in window:
            (share(model, piece) * after).backward()
            if each:
                clip_grad_norm_(model.parameters(), limit, kind)
        if not each:
            clip_grad_norm_(model.parameters(), limit, kind)
        for parameter in model.parameters():
            parameter.grad /= after
        optimizer.step()

    return step


def divided_then_clipped(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
    optimizer.zero_grad()
    for inputs, labels in window:
        F.cross_entropy(model(inputs), labels, reduction="sum").backward()
    for parameter in model.parameters():
        parameter.grad /= SAMPLES
    clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def by_a_counter(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
    for index in range(3):
        (F.cross_entropy(model(window[index][0]), window[index][1]) / 3).backward()
        if (index + 1) % 3 == 0:
            clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def scaled_by(*, unscaled: bool, limit: float | None) -> Step:
    def step(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
        scaler = torch.amp.GradScaler("cpu")
        optimizer.zero_grad()
        for piece in window:
            scaler.scale(share(model, piece)).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        if limit:
            clip_grad_norm_(model.parameters(), limit)
        scaler.step(optimizer)
        scaler.update()

    return step


@pytest.mark.parametrize(
    "step",
    [
        clipping(0.05),
        clipping(0.02, kind=float("inf")),
        clipping(1e3),
        divided_then_clipped,
        by_a_counter,
        scaled_by(unscaled=False, limit=None),
        scaled_by(unscaled=True, limit=None),
        scaled_by(unscaled=True, limit=0.05),
    ],
)
def test_a_clip_or_a_gradient_scaler_is_right_wherever_it_is_put_rightly(step: Step) -> None:
    found = judged(step)
    assert found.equivalent, found.causes


def test_a_clip_of_small_gradients_is_right() -> None:
    objective = Objective(
        lambda model, data: 1e-3 * F.cross_entropy(model(data[0]), data[1], reduction="sum"), lambda data: len(data[1])
    )

    def step(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
        optimizer.zero_grad()
        for piece in window:
            (1e-3 * share(model, piece)).backward()
        clip_grad_norm_(model.parameters(), 1e-5)
        optimizer.step()

    assert diagnose(network, objective, batch(), cuts=[CUT], step=step).equivalent


@pytest.mark.parametrize(
    ("step", "mistake"),
    [
        (clipping(0.05, each=True), "the clip changes the gradient's direction"),
        (clipping(10.0, each=True), "it clips after every micro-batch, although no clip is reached"),
        (clipping(0.05, after=SAMPLES), "it is clipped, and then divided"),
        (scaled_by(unscaled=False, limit=0.05), "it is clipped, and then divided"),
    ],
)
def test_a_clip_in_the_wrong_place_is_named(step: Step, mistake: str) -> None:
    found = judged(step)
    assert not found.equivalent
    assert mistake in told(found)

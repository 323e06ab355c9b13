"""Modes, later windows, random layers and batches that are changed: what a loop and a model do beside a gradient."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from gradaccum import Objective, diagnose
from gradaccum.measurements.subject import UnjudgedError
from tests.measurements.loops import (
    CLASSES,
    CLASSIFICATION,
    FEATURES,
    SAMPLES,
    Step,
    Window,
    batch,
    network,
    the_cause,
)
from tests.measurements.test_diagnose_models import FunctionalDropout
from tests.measurements.test_diagnose_steps import CUT, judged, right, told

Layer = Callable[[], nn.Module]


def evaluating(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
    model.eval()
    right(model, optimizer, window)


def evaluating_after(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
    right(model, optimizer, window)
    model.eval()


def validating(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
    model.train()
    right(model, optimizer, window)
    model.eval()
    with torch.no_grad():
        model(window[0][0])


@pytest.mark.parametrize("layer", [lambda: nn.Dropout(0.5), FunctionalDropout])
def test_training_in_evaluation_mode_is_named_in_whichever_window(layer: Layer) -> None:
    for step in (evaluating, evaluating_after):
        found = judged(step, layer)
        assert not found.equivalent
        assert "the model runs in evaluation mode" in told(found)
    assert judged(validating, layer).equivalent


def test_a_batch_norm_is_seen_beside_randomness_that_no_layer_shows() -> None:
    found = judged(right, lambda: nn.BatchNorm1d(8), FunctionalDropout)
    assert not found.equivalent
    assert the_cause(found, "batch norm").where == ("1 (BatchNorm1d)",)
    assert "whatever acts only in training was not compared" in the_cause(found, "randomness").advice


def resting(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    right(model, optimizer, window)


def test_a_loop_that_freezes_its_batch_norms_is_compared_so_and_one_in_evaluation_mode_is_not() -> None:
    assert judged(resting, lambda: nn.BatchNorm1d(8)).equivalent
    assert not judged(evaluating, lambda: nn.BatchNorm1d(8)).equivalent


def clears_not_after_the_second(model: Any, optimizer: Optimizer, window: Window) -> None:
    for inputs, labels in window:
        (F.cross_entropy(model(inputs), labels, reduction="sum") / SAMPLES).backward()
    optimizer.step()
    model.windows = getattr(model, "windows", 0) + 1
    if model.windows != 2:
        optimizer.zero_grad()


def forgets_momentum(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
    optimizer.state.clear()
    right(model, optimizer, window)


@pytest.mark.parametrize(
    ("step", "mistake"),
    [
        (clears_not_after_the_second, "gradients are not cleared between windows"),
        (forgets_momentum, "the loop clears or changes it"),
    ],
)
def test_what_a_loop_does_to_later_windows_is_seen(step: Step, mistake: str) -> None:
    found = judged(step)
    assert not found.equivalent
    assert mistake in told(found)


def test_a_second_window_that_diverges_is_no_fault_of_the_loop() -> None:
    poisson = Objective(
        lambda model, data: (model(data[0]).exp() - data[1] * model(data[0])).sum(), lambda x: len(x[1])
    )
    data = (batch()[0], torch.full((SAMPLES, 1), 1e6))
    assert diagnose(lambda: nn.Linear(FEATURES, 1), poisson, data, cuts=[CUT]).equivalent


class Depth(nn.Module):
    """A layer that is left out for a whole batch, one time in ten."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw, self.layer = draw, nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden if self.training and self.draw() < 0.1 else hidden + self.layer(hidden)


class OwnNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, hidden: Tensor) -> Tensor:
        noise = torch.randn(hidden.shape, generator=self.generator, dtype=hidden.dtype)
        return hidden + noise if self.training else hidden


@pytest.mark.parametrize(
    "layer",
    [
        lambda: Depth(lambda: torch.rand(()).item()),
        lambda: Depth(random.random),
        lambda: Depth(np.random.rand),
        OwnNoise,
    ],
)
def test_randomness_is_found_however_rare_and_wherever_it_is_drawn(layer: Layer) -> None:
    found = judged(right, layer)
    assert found.equivalent
    assert the_cause(found, "randomness").where == ("something outside the dropout layers",)


class InPlace(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.sub_(0.3)


def test_a_model_or_a_loop_may_change_its_batch() -> None:
    def popping(model: nn.Module, optimizer: Optimizer, window: Any) -> None:
        right(model, optimizer, [(piece["inputs"], piece.pop("labels")) for piece in window])

    objective = Objective(
        lambda model, data: F.cross_entropy(model(data["inputs"]), data["labels"], reduction="sum"),
        lambda data: len(data["labels"]),
    )
    inputs, labels = batch()
    before = inputs.clone()
    assert diagnose(network, objective, {"inputs": inputs, "labels": labels}, cuts=[CUT], step=popping).equivalent
    assert diagnose(
        lambda: nn.Sequential(InPlace(), network()), CLASSIFICATION, (inputs, labels), cuts=[CUT]
    ).equivalent
    assert torch.equal(inputs, before)


def dead_network() -> nn.Module:
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES, bias=False))
    nn.init.zeros_(model[0].weight)
    nn.init.constant_(model[0].bias, -1.0)
    return model


def test_a_gradient_that_is_zero_everywhere_is_not_judged() -> None:
    with pytest.raises(UnjudgedError, match="zero everywhere"):
        diagnose(dead_network, CLASSIFICATION, batch())

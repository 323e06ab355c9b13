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

from gradaccum import BatchError, Objective, diagnose
from gradaccum.measurements.diagnose import default_cuts
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
    run,
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


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs).float()


def test_what_is_computed_in_float32_is_held_to_float32s_rounding() -> None:
    found = diagnose(Wide, CLASSIFICATION, batch(), cuts=[CUT])
    assert found.equivalent
    assert "computed in float32" in told(found)

    def undivided(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
        optimizer.zero_grad()
        for inputs, labels in window:
            F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    assert "not divided by the 3" in told(diagnose(Wide, CLASSIFICATION, batch(), cuts=[CUT], step=undivided))


def mean(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(data[0]), data[1])


def penalised(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    penalty = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
    return mean(model, data) * len(data[1]) + penalty


def balanced(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return mean(model, data) * len(data[1]) + len(data[1]) * model(data[0]).softmax(-1).mean(0).square().sum()


@pytest.mark.parametrize(
    ("loss_sum", "finding", "advice"),
    [
        (mean, "loss_sum returns a mean", "Return the sum"),
        (penalised, "adds the same in every pass", "counts 1 in each"),
        (balanced, "no sum over samples", "a balance of experts"),
    ],
)
def test_why_a_loss_is_no_sum_is_told(loss_sum: Callable[..., Tensor], finding: str, advice: str) -> None:
    cause = the_cause(diagnose(network, Objective(loss_sum, lambda data: len(data[1])), batch()), "not separable")
    assert finding in cause.finding
    assert advice in cause.advice


def test_a_right_gradient_beside_another_loss_is_told_apart() -> None:
    def step(model: nn.Module, optimizer: Optimizer, window: Window) -> float:
        right(model, optimizer, window)
        return 7.0

    found = judged(step)
    assert [cause.kind for cause in found.causes] == ["reported loss"]
    assert "the step returns 7, and the window's mean is" in told(found)


class Normalised(nn.Module):
    """Its backward pass normalises the gradient of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layer.weight.register_hook(lambda gradient: gradient / gradient.norm())

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.passes, self.layer = 0, nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        self.passes += 1
        return hidden + self.layer(hidden) * self.passes


class OverSamples(nn.Module):
    """Attention in which batch_first was forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.attention(*[hidden[:, None]] * 3)[0][:, 0]


@pytest.mark.parametrize(
    ("layer", "kind", "words"),
    [
        (Normalised, "backward", "add up to another"),
        (Counting, "moving state", "changes 1.passes"),
        (OverSamples, "mixing layers", "1.attention (MultiheadAttention)"),
        (lambda: nn.BatchNorm1d(8, track_running_stats=False), "batch norm", "1 (BatchNorm1d)"),
    ],
)
def test_the_model_is_blamed_for_what_it_does(layer: Layer, kind: Any, words: str) -> None:
    found = judged(right, layer)
    assert [cause.kind for cause in found.causes] == [kind]
    assert words in told(found)


def test_a_norm_without_running_statistics_is_not_advised_to_use_them() -> None:
    advice = the_cause(judged(right, lambda: nn.BatchNorm1d(8, track_running_stats=False)), "batch norm").advice
    assert "eval mode would change nothing" in advice


def test_lazy_layers_and_sparse_gradients_are_judged() -> None:
    lazy = lambda: nn.Sequential(nn.LazyLinear(8), nn.GELU(), nn.LazyLinear(CLASSES))  # noqa: E731
    assert diagnose(lazy, CLASSIFICATION, batch(), cuts=[CUT]).equivalent
    tokens = torch.arange(SAMPLES * 3).view(SAMPLES, 3) % 9
    sparse = lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(12, CLASSES))  # noqa: E731
    assert diagnose(sparse, CLASSIFICATION, (tokens, batch()[1]), cuts=[CUT]).equivalent


@pytest.mark.parametrize("samples", range(4, 12))
def test_default_cuts_leave_a_batch_norm_two_samples(samples: int) -> None:
    assert all(min(cut) > 1 for cut in default_cuts(samples, statistics=True))


def test_a_batch_too_small_for_a_batch_norm_is_refused() -> None:
    inputs, labels = batch()
    with pytest.raises(BatchError, match="a batch norm needs two samples"):
        run(lambda: nn.BatchNorm1d(8), cuts=None, data=(inputs[:3], labels[:3]))


def test_a_cut_that_does_not_add_up_is_named_as_it_was_given() -> None:
    with pytest.raises(BatchError, match=r"the cut \[4, 4\] adds up to 8, but the batch has 12"):
        run(cuts=[(4, 4)])

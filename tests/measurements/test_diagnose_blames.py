"""What a model or an objective does, told apart from what a loop does; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from gradaccum import BatchError, Objective, diagnose
from gradaccum.measurements.diagnose import default_cuts
from tests.measurements.loops import (
    CLASSES,
    CLASSIFICATION,
    SAMPLES,
    Window,
    batch,
    network,
    run,
    the_cause,
)
from tests.measurements.test_diagnose_steps import CUT, judged, right, told

Layer = Callable[[], nn.Module]


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

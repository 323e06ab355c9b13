"""What nobody writes on purpose, and an engine must still be right about."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradaccum import Accumulator, BatchError, ConfigError, Objective, split
from gradaccum.errors import StateError


class WithScale(nn.Module):
    """A linear layer, and a parameter of shape [1] that a loss uses through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1).double()
        self.scale = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, batch: Tensor) -> Tensor:
        squares: Tensor = self.linear(batch).square().sum()
        return squares + len(batch) * self.scale.squeeze()


def still(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that moves nothing."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}])
@pytest.mark.parametrize("cut", [[8], [4, 4], [5, 2, 1]])
def test_a_parameter_that_a_loss_only_views_has_the_same_gradient_in_every_window(
    cut: list[int], options: dict[str, Any]
) -> None:
    model = WithScale()
    batch = torch.randn(8, 4, dtype=torch.float64)
    (model(batch) / 8).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    accumulator = Accumulator(model, still(model), Objective(lambda m, b: m(b), len), **options)
    for _ in range(3):
        torch.testing.assert_close(accumulator.step(split(batch, cut)).grad_norm, expected)


def test_parameters_that_join_the_optimizer_later_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = still(model)
    accumulator = Accumulator(model, optimizer, Objective(lambda m, b: m(b).sum(), len))
    model.append(nn.Linear(4, 1))
    optimizer.add_param_group({"params": list(model[1].parameters())})
    with pytest.raises(ConfigError, match=r"steps 4 parameters, but had 2 .* Build it after"):
        accumulator.step([torch.ones(2, 4)])


def test_a_term_that_is_no_number_makes_the_loss_none() -> None:
    model = nn.Linear(4, 1)
    objective = Objective(
        lambda m, b: {"right": m(b).sum(), "broken": m(b).sum() * float("nan")},
        lambda b: {"right": len(b), "broken": len(b)},
        weights={"right": 1, "broken": 1},
    )
    assert Accumulator(model, still(model), objective).step([torch.ones(2, 4)]).loss.isnan()


def test_a_window_inside_a_window_is_refused() -> None:
    model = nn.Linear(4, 1)

    def loss_sum(m: nn.Module, batch: Tensor) -> Tensor:
        accumulator.step([batch])
        return m(batch).sum()

    accumulator = Accumulator(model, still(model), Objective(loss_sum, len))
    with pytest.raises(StateError, match=r"step\(\) was called in the middle of a window"):
        accumulator.step([torch.ones(2, 4)])


def test_the_loss_scale_survives_many_windows_that_are_not_finite() -> None:
    model = nn.Linear(4, 3)
    accumulator = Accumulator(model, still(model), Objective.classification(), precision="fp16")
    labels = torch.zeros(4, dtype=torch.long)
    for _ in range(200):
        accumulator.step([(torch.full((4, 4), float("nan")), labels)])
    step = accumulator.step([(torch.ones(4, 4), labels)])
    assert step.applied
    assert step.grad_norm > 0


@pytest.mark.parametrize("count", [np.int64(2), np.float32(2), np.float64(2), torch.tensor(2), 2, 2.0])
def test_a_count_may_be_any_number(count: Any) -> None:
    model = nn.Linear(4, 1)
    step = Accumulator(model, still(model), Objective(lambda m, b: m(b).sum(), lambda _: count)).step(
        [torch.ones(2, 4)]
    )
    assert step.count == 2


def test_logits_and_labels_that_do_not_match_are_refused() -> None:
    model = nn.Linear(4, 3)
    batch = (torch.ones(5, 2, 4), torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(BatchError, match=r"\(5, 2, 3\) and labels of shape \(2, 5\) do not match"):
        Accumulator(model, still(model), Objective.classification()).step([batch])


def test_a_loss_is_that_of_before_the_step() -> None:
    model = WithScale()
    objective = Objective(lambda m, b: m.scale.squeeze(), lambda _: 1)
    step = Accumulator(model, torch.optim.SGD(model.parameters(), lr=1.0), objective).step([torch.ones(2, 4)])
    assert step.loss == 0
    assert model.scale.item() == -1


def test_a_state_that_lacks_parts_changes_nothing() -> None:
    model = nn.Linear(4, 1)
    accumulator = Accumulator(model, still(model), Objective(lambda m, b: m(b).sum(), len))
    with pytest.raises(StateError, match="lacks loss_scale, master_weights"):
        accumulator.load_state_dict({"steps": 9})
    wrong = {**copy.deepcopy(accumulator.state_dict()), "steps": 9, "optimizer": {"state": {}, "param_groups": []}}
    with pytest.raises(ValueError, match="parameter groups"):
        accumulator.load_state_dict(wrong)
    assert accumulator.steps == 0

"""Batches, windows, counts and losses as they come from real loaders: taken where they can be right, else refused."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradaccum import Accumulator, BatchError, BatchPlan, ConfigError, Objective, fit_micro_batch, split, windows
from tests.engine.reference import (
    CLASSIFICATION,
    FEATURES,
    accumulated,
    assert_same,
    gradient_of,
    make_batch,
    make_model,
    mean_loss,
    window_of,
)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@dataclass(frozen=True)
class Sample:
    inputs: Tensor
    mask: Tensor | None = None


ROWS = torch.arange(12.0).view(6, 2)


@pytest.mark.parametrize(
    "batch",
    [
        {"inputs": ROWS},
        OrderedDict(inputs=ROWS),
        defaultdict(list, inputs=ROWS),
        UserDict(inputs=ROWS),  # of this kind are the batches of Hugging Face's tokenizers and collators
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_a_mapping_is_cut_into_mappings_of_its_kind(batch: Any) -> None:
    pieces = split(batch, 4)
    assert [type(piece) for piece in pieces] == [type(batch)] * 2
    assert [piece["inputs"].tolist() for piece in pieces] == [ROWS[:4].tolist(), ROWS[4:].tolist()]
    assert batch["inputs"] is ROWS


def test_a_mapping_that_cannot_be_changed_is_cut_into_dicts() -> None:
    assert [type(piece) for piece in split(MappingProxyType({"inputs": ROWS}), 4)] == [dict, dict]


def test_a_dataclass_is_cut_field_by_field_and_none_stays_none() -> None:
    first, second = split(Sample(ROWS), 4)
    assert (first.inputs.tolist(), second.inputs.tolist()) == (ROWS[:4].tolist(), ROWS[4:].tolist())
    assert (first.mask, second.mask) == (None, None)


@pytest.mark.parametrize("size", [np.int64(5), np.int32(5), torch.tensor(5), np.array(5)], ids=repr)
def test_a_size_may_be_any_whole_number(size: Any) -> None:
    assert [len(piece) for piece in split(torch.ones(12), size)] == [5, 5, 2]
    assert len(list(windows(range(12), size))) == 3
    assert BatchPlan(effective_batch=size, micro_batch=size) == BatchPlan(effective_batch=5, micro_batch=5)


@pytest.mark.parametrize("cut", [(7, 5), np.array([7, 5]), [np.int64(7), np.int32(5)], torch.tensor([7, 5])], ids=repr)
def test_a_cut_may_be_any_row_of_whole_numbers(cut: Any) -> None:
    assert [len(piece) for piece in split(torch.ones(12), cut)] == [7, 5]


@pytest.mark.parametrize("size", [2.0, "5", "atuo", None, True, [7.0, 5.0], [True, 11]], ids=repr)
def test_a_size_that_is_no_whole_number_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"is not an integer. Set it to a whole number"):
        split(torch.ones(12), size)


NOT_CUT = {
    "no samples": (torch.ones(0, 3), "the batch has 0 samples"),
    "sparse": (torch.eye(4).to_sparse(), r"holds a torch\.sparse_coo tensor, which has no rows to cut"),
    "jagged": (
        torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged),
        "holds a nested tensor, which has no rows to cut",
    ),
    "an object": ((torch.ones(3), object()), r"this one holds a object, and how to cut that is unknown"),
}


@pytest.mark.parametrize(("batch", "message"), NOT_CUT.values(), ids=NOT_CUT)
def test_what_has_no_rows_is_not_cut(batch: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        split(batch, 2)


@pytest.mark.parametrize("use", [fit_micro_batch, Accumulator.step_batch], ids=["fit_micro_batch", "step_batch"])
def test_an_empty_batch_is_refused(use: Callable[[Accumulator, Any], object]) -> None:
    model = make_model()
    with pytest.raises(BatchError, match="the batch has 0 samples, so there is no gradient"):
        use(Accumulator(model, sgd(model), CLASSIFICATION), make_batch(0))


MICRO_BATCHES = {
    "text first": {"name": ["a", "b", "c"], "inputs": ROWS[:3]},
    "a number first": {"step": torch.tensor(7), "inputs": ROWS[:3]},
    "nested": {"meta": {"id": 1}, "data": [None, ROWS[:3]]},
    "UserDict": UserDict(inputs=ROWS[:3]),
    "dataclass": Sample(ROWS[:3]),
}


@pytest.mark.parametrize("batch", MICRO_BATCHES.values(), ids=MICRO_BATCHES)
def test_samples_are_the_rows_of_the_first_tensor_that_has_any(batch: Any) -> None:
    model = make_model()
    objective = Objective(lambda m, b: m(torch.ones(1, FEATURES).double()).sum(), lambda b: 1)
    assert Accumulator(model, sgd(model), objective).step([batch]).samples == 3


NO_WINDOW = {
    "generator": lambda: (batch for batch in window_of([5, 7])),
    "tensor": lambda: make_batch()[0],
    "dict": lambda: {"inputs": make_batch()[0]},
    "none": lambda: None,
}


@pytest.mark.parametrize("window", NO_WINDOW.values(), ids=NO_WINDOW)
def test_a_window_that_is_no_list_is_refused(window: Callable[[], Any]) -> None:
    model = make_model()
    with pytest.raises(BatchError, match=r"the window is a .*, not a list of micro-batches.*windows\(\) yields"):
        Accumulator(model, sgd(model), CLASSIFICATION).step(window())


def test_a_whole_batch_given_as_a_window_is_refused() -> None:
    model = make_model()
    with pytest.raises(BatchError, match=r"a micro-batch is a Tensor and no pair .*split\(batch, micro_batch\)"):
        Accumulator(model, sgd(model), CLASSIFICATION).step(make_batch())


COUNTS = [np.int64(2), np.float32(2), np.array(2), torch.tensor(2), torch.tensor(2.0, requires_grad=True), 2, 2.0]


@pytest.mark.parametrize("count", COUNTS, ids=repr)
def test_a_count_may_be_any_number(count: Any) -> None:
    model = make_model()
    reference = gradient_of(mean_loss(model, make_batch()) * 12 / 6, model)
    step = Accumulator(model, sgd(model), Objective(CLASSIFICATION.loss_sum, lambda _: count)).step(
        window_of([5, 4, 3])
    )
    assert step.count == 6
    assert type(step.count) in (int, float)
    assert_same(accumulated(model), reference)


@pytest.mark.parametrize(
    "count", [-1, float("nan"), float("inf"), 10**400, 1e308, None, "2", 2j, torch.ones(1), np.array([2])], ids=str
)
def test_a_count_that_nothing_can_be_divided_by_is_refused(count: Any) -> None:
    model = make_model()
    objective = Objective(CLASSIFICATION.loss_sum, lambda batch: 5 if len(batch[1]) == 5 else count)
    with pytest.raises(BatchError, match=r"micro-batch 1 of the window counts .* targets.*Return a number from 0 to"):
        Accumulator(model, sgd(model), objective).step(window_of([5, 4, 3]))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (3.0, "a float, not a tensor"),
        (None, "a NoneType, not a tensor"),
        (torch.ones(2), r"a tensor of shape \(2,\), not a scalar"),
        (torch.tensor(3), r"a loss of type torch\.int64"),
        (torch.tensor(3j), r"a loss of type torch\.complex64"),
    ],
)
def test_a_loss_that_is_no_real_scalar_is_refused(returned: Any, message: str) -> None:
    model = make_model()
    with pytest.raises(BatchError, match=f"Objective.loss_sum returned {message}"):
        Accumulator(model, sgd(model), Objective(lambda m, b: returned, lambda b: 1)).step([make_batch()])


@pytest.mark.parametrize("weights", [{"a": "1"}, {"a": None}, {"a": float("nan")}, ["a"], {}], ids=repr)
def test_weights_that_are_no_numbers_are_refused(weights: Any) -> None:
    with pytest.raises(ConfigError, match=r"weight"):
        Objective(lambda m, b: {}, lambda b: {}, weights)


def labelled(labels: Any) -> tuple[Tensor, Any]:
    return make_batch(3)[0], labels


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (labelled(torch.zeros(3, 1).long()), r"\(3, 4\) and labels of shape \(3, 1\) do not match"),
        (labelled(torch.full((3, 4), 0.25)), "labels are torch.float32, not whole numbers"),
        (labelled([0, 1, 2]), "labels are list, not whole numbers in a tensor"),
        ((*make_batch(3), 1), r"a micro-batch is a tuple and no pair \(inputs, labels\)"),
        ({"inputs": ROWS, "labels": ROWS}, r"a micro-batch is a dict and no pair \(inputs, labels\)"),
    ],
)
def test_labels_that_cannot_be_classes_are_refused(batch: Any, message: str) -> None:
    model = make_model()
    with pytest.raises(BatchError, match=message):
        Accumulator(model, sgd(model), CLASSIFICATION).step([batch])


def test_logits_and_labels_of_positions_that_do_not_match_are_refused() -> None:
    model = nn.Linear(4, 3)
    batch = (torch.ones(5, 2, 4), torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(BatchError, match=r"\(5, 2, 3\) and labels of shape \(2, 5\) do not match"):
        Accumulator(model, sgd(model), CLASSIFICATION).step([batch])


def test_a_batch_of_the_users_own_kind_is_stepped_on_and_counts_by_its_length_or_as_one() -> None:
    class Graphs(list):
        """Its items are no batch's."""

    model = nn.Linear(4, 1)
    objective = Objective(lambda m, batch: m(torch.ones(len(batch.__dict__) + 1, 4)).sum(), lambda batch: 1)
    window = [SimpleNamespace(rows=3), Graphs(["a", "b"])]
    assert Accumulator(model, sgd(model), objective).step(window).samples == 3

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradaccum import Accumulator, BatchError, ConfigError, Objective, split
from tests.engine.reference import (
    UNEVEN_CUTS,
    accumulated,
    assert_same,
    gradient_of,
    make_batch,
    make_model,
    mean_loss,
)

WEIGHTS = {"tokens": 1.0, "balance": 0.3}


def step_on(model: nn.Module, objective: Objective, window: list[object]) -> object:
    return Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), objective).step(window)


def test_a_micro_batch_weighs_as_much_as_it_has_targets() -> None:
    """Losses 3 and 1 over 1 and 99 targets are 1.02 on average, not 2."""
    scale = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(scale.weight)
    objective = Objective(loss_sum=lambda model, batch: model(batch).sum(), count=len)
    window = [torch.full((1, 1), 3.0).double(), torch.full((99, 1), 1.0).double()]
    assert step_on(scale, objective, window).loss.item() == pytest.approx(1.02, rel=1e-12)


@pytest.mark.parametrize("cut", UNEVEN_CUTS, ids=str)
def test_class_weights_divide_by_the_weights_of_the_whole_window(cut: list[int]) -> None:
    weight = torch.tensor([0.1, 3.0, 1.0, 0.5], dtype=torch.float64)
    batch, model = make_batch(), make_model()
    expected = mean_loss(model, batch, weight)
    reference = gradient_of(expected, model)
    step = step_on(model, Objective.classification(class_weights=weight), split(batch, cut))
    assert_same([step.loss, *accumulated(model)], [expected.detach(), *reference])
    assert step.count == pytest.approx(weight[batch[1]].sum().item())


@pytest.mark.parametrize("cut", UNEVEN_CUTS, ids=str)
@pytest.mark.parametrize("ignore_index", [-100, 2])
def test_ignored_labels_are_no_targets(cut: list[int], ignore_index: int) -> None:
    inputs, labels = make_batch()
    labels[[0, 1, 7, 11]] = ignore_index
    model = make_model()
    expected = F.cross_entropy(model(inputs), labels, ignore_index=ignore_index)
    reference = gradient_of(expected, model)
    step = step_on(model, Objective.classification(ignore_index=ignore_index), split((inputs, labels), cut))
    assert_same([step.loss, *accumulated(model)], [expected.detach(), *reference])
    assert step.count == (labels != ignore_index).sum()


def balance(logits: Tensor) -> Tensor:
    """A term that belongs to a micro-batch as a whole, as a router's load balancing does."""
    return logits.softmax(-1).mean(0).square().sum()


def two_terms() -> Objective:
    """Token-averaged cross-entropy, and a balancing term averaged over micro-batches."""

    def loss_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        logits = model(batch[0])
        return {"balance": balance(logits), "tokens": F.cross_entropy(logits, batch[1], reduction="sum")}

    return Objective(loss_sum, count=lambda batch: {"tokens": (batch[1] != -100).sum(), "balance": 1}, weights=WEIGHTS)


@pytest.mark.parametrize("cut", UNEVEN_CUTS, ids=str)
def test_each_term_is_divided_by_its_own_count(cut: list[int]) -> None:
    inputs, labels = make_batch()
    labels[[0, 3]] = -100
    window, model = split((inputs, labels), cut), make_model()
    tokens = F.cross_entropy(model(inputs), labels)
    balancing = torch.stack([balance(model(piece)) for piece, _ in window]).mean()
    total = tokens + 0.3 * balancing
    reference = gradient_of(total, model)
    step = step_on(model, two_terms(), window)
    assert_same([step.loss, *accumulated(model)], [total.detach(), *reference])
    assert_same([step.terms["tokens"], step.terms["balance"]], [tokens.detach(), balancing.detach()])
    assert step.count == 10


def test_a_term_without_targets_leaves_the_others_alone() -> None:
    inputs, labels = make_batch()
    labels[:5] = -100
    window, model = split((inputs, labels), [5, 7]), make_model()
    balancing = torch.stack([balance(model(piece)) for piece, _ in window]).mean()
    total = F.cross_entropy(model(inputs), labels) + 0.3 * balancing
    reference = gradient_of(total, model)
    step = step_on(model, two_terms(), window)
    assert_same([step.loss, *accumulated(model)], [total.detach(), *reference])

    labels[:] = -100
    step = step_on(model, two_terms(), split((inputs, labels), [5, 7]))
    assert step.applied
    assert step.terms["tokens"].isnan()
    assert_same([step.loss], [0.3 * step.terms["balance"]])


def test_a_term_that_is_no_number_where_it_has_no_target_enters_neither_loss_nor_gradient() -> None:
    inputs, labels = make_batch()
    labels[:5] = -100

    def loss_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        logits, count = model(batch[0]), (batch[1] != -100).sum()
        return {"tokens": F.cross_entropy(logits, batch[1]) * count, "size": logits.square().sum()}

    objective = Objective(
        loss_sum, lambda batch: {"tokens": (batch[1] != -100).sum(), "size": len(batch[1])}, {"tokens": 1, "size": 0.1}
    )
    model = make_model()
    total = F.cross_entropy(model(inputs), labels) + 0.1 * model(inputs).square().sum() / len(labels)
    reference = gradient_of(total, model)
    step = step_on(model, objective, split((inputs, labels), [5, 7]))
    assert_same([step.loss, *accumulated(model)], [total.detach(), *reference])


def test_infinite_losses_of_both_signs_make_a_loss_that_is_no_number() -> None:
    objective = Objective(lambda model, batch: model(batch).sum() * batch.sum(), len)
    step = step_on(nn.Linear(1, 1), objective, [torch.full((1, 1), 3e38), torch.full((1, 1), -3e38)])
    assert not step.loss.isfinite()


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (Objective(lambda model, batch: model(batch[0]), len), r"shape \(12, 4\), not a scalar"),
        (Objective(lambda model, batch: model(batch[0]).sum(), lambda batch: -1), r"counts -1 targets"),
        (Objective(lambda model, batch: model(batch[0]).sum(), lambda batch: float("nan")), r"counts nan targets"),
        (Objective(lambda model, batch: model(batch[0]).sum(), lambda batch: torch.ones(3)), r"counts tensor\(\[1"),
        (Objective(lambda model, batch: model(batch[0]).sum(), len, {"a": 1.0}), r"count returned a int.*\['a'\]"),
        (
            Objective(lambda model, batch: {"b": 0}, lambda batch: {"a": 1}, {"a": 1.0}),
            r"loss_sum returned \['b'\], but weights names the terms \['a'\]",
        ),
    ],
)
def test_an_objective_that_gives_no_sum_and_count_is_refused(objective: Objective, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        step_on(make_model(), objective, [make_batch()])


@pytest.mark.parametrize("weights", [{}, {"tokens": float("inf")}])
def test_weights_that_weigh_nothing_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="weight"):
        Objective(lambda model, batch: {}, lambda batch: {}, weights)


@pytest.mark.parametrize("samples", [4, 300])
def test_few_and_many_labels_are_counted_alike(samples: int) -> None:
    labels = torch.randint(3, (samples, 2), generator=torch.Generator().manual_seed(0))
    count = Objective.classification(ignore_index=1).count((torch.zeros(samples), labels))
    assert int(count) == int((labels != 1).sum())


def test_a_term_that_is_no_number_makes_the_loss_none() -> None:
    model = nn.Linear(4, 1)
    objective = Objective(
        lambda m, b: {"right": m(b).sum(), "broken": m(b).sum() * float("nan")},
        lambda b: {"right": len(b), "broken": len(b)},
        weights={"right": 1, "broken": 1},
    )
    assert step_on(model, objective, [torch.ones(2, 4)]).loss.isnan()

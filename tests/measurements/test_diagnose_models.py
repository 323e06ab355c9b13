from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradaccum import Objective, diagnose
from gradaccum.measurements.subject import UnjudgedError
from gradaccum.workloads.choice import WorkloadChoice
from tests.measurements.loops import (
    CLASSIFICATION,
    SAMPLES,
    UNEVEN,
    batch,
    loop,
    network,
    run,
    the_cause,
)


def test_batch_norm_is_named_where_it_trains_and_the_loop_is_not_blamed() -> None:
    found = run(lambda: nn.BatchNorm1d(8))
    assert not found.equivalent
    assert [cause.kind for cause in found.causes] == ["batch norm"]
    assert the_cause(found, "batch norm").where == ("1 (BatchNorm1d)",)
    assert not any(cut.mistake for cut in found.cuts)


def test_a_wrong_loop_is_seen_through_a_batch_norm() -> None:
    found = run(lambda: nn.BatchNorm1d(8), step=loop(lambda mean, _, n: mean))
    assert {cause.kind for cause in found.causes} == {"batch norm", "loop"}


class Frozen(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


@pytest.mark.parametrize("layer", [lambda: nn.GroupNorm(2, 8), lambda: nn.LayerNorm(8), lambda: Frozen(8)])
def test_normalisation_that_treats_samples_one_by_one_is_equivalent(layer: Callable[[], nn.Module]) -> None:
    assert run(layer).equivalent


class Centred(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(0)


def test_any_layer_that_mixes_samples_is_named() -> None:
    assert the_cause(run(Centred), "mixing layers").where == ("1 (Centred)",)
    both = run(lambda: nn.BatchNorm1d(8), Centred)
    assert [cause.where for cause in both.causes] == [("1 (BatchNorm1d)",), ("2 (Centred)",)]


class Positive(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden > 0


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask, self.centred = Positive(), Centred()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mask(hidden) * self.centred(hidden)


def test_layers_that_give_truth_values_are_looked_past() -> None:
    assert the_cause(run(Masked), "mixing layers").where == ("1.centred (Centred)",)


class FunctionalDropout(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, 0.5, training=self.training)


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (lambda: nn.Dropout(0.5), ("1 (Dropout)",)),
        (FunctionalDropout, ("something outside the dropout layers",)),
    ],
)
def test_randomness_is_named_and_turned_off_for_the_comparison(
    layer: Callable[[], nn.Module], names: tuple[str, ...]
) -> None:
    found = run(layer)
    assert found.equivalent
    assert the_cause(found, "randomness").where == names
    wrong = run(layer, step=loop(lambda mean, _, n: mean))
    assert not wrong.equivalent
    assert all("not divided" in cause.finding for cause in wrong.causes if cause.kind == "loop")


class Noise(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.randn_like(hidden)


def test_randomness_that_cannot_be_turned_off_is_not_judged() -> None:
    with pytest.raises(UnjudgedError, match="another gradient each time"):
        run(Noise)


def test_the_contrastive_workload_is_not_separable() -> None:
    workload = WorkloadChoice.parse({"name": "contrastive"}).load()
    data = workload.collate([workload.train[index] for index in range(SAMPLES)])
    found = diagnose(workload.make_model, workload.objective, data)
    assert not found.equivalent
    assert [cause.kind for cause in found.causes] == ["not separable"]
    assert "negatives" in found.causes[0].advice


@pytest.mark.parametrize("name", ["digits", "dictionary", "definitions"])
def test_the_other_workloads_are_equivalent(name: str) -> None:
    workload = WorkloadChoice.parse({"name": name}).load()
    data = workload.collate([workload.train[index] for index in range(6)])
    assert diagnose(workload.make_model, workload.objective, data, cuts=[(3, 2, 1)]).equivalent


def test_an_objective_of_several_terms_is_judged_as_a_whole() -> None:
    def loss_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        logits = model(batch[0])
        return {
            "targets": F.cross_entropy(logits, batch[1], reduction="sum"),
            "size": logits.square().sum(),
        }

    objective = Objective(
        loss_sum,
        lambda batch: {"targets": (batch[1] < 2).sum() + 1, "size": len(batch[0])},
        weights={"targets": 1.0, "size": 0.1},
    )
    found = diagnose(network, objective, batch(), cuts=[UNEVEN])
    assert [cause.kind for cause in found.causes] == [
        "not separable"
    ]  # the counts do not add up: each has a 1 too many


def frozen_network() -> nn.Module:
    return network().requires_grad_(False)


def exploding_network() -> nn.Module:
    model = network()
    nn.init.constant_(model[0].weight, float("inf"))
    return model


ONE = network()


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: ONE, "model_factory returns the same parameters each time"),
        (frozen_network, "no parameter of the model requires a gradient"),
        (exploding_network, "the gradient of the whole batch is not finite"),
    ],
)
def test_models_that_give_nothing_to_compare_are_not_judged(factory: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(UnjudgedError, match=message):
        diagnose(factory, CLASSIFICATION, batch())


def test_a_batch_without_targets_is_not_judged() -> None:
    inputs, labels = batch()
    with pytest.raises(UnjudgedError, match="no sample of the batch has a target"):
        run(data=(inputs, torch.full_like(labels, -100)))


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))


class Late(nn.Module):
    """Subtracts the mean of the micro-batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, hidden: Tensor) -> Tensor:
        late, self.mean = self.mean, hidden.detach().mean(0)
        return hidden - late


@pytest.mark.parametrize(("layer", "buffers"), [(spectral, r"1\.param.*_u, .*_v"), (Late, r"1\.mean")])
def test_state_that_every_pass_moves_is_named_and_the_loop_is_not_blamed(
    layer: Callable[[], nn.Module], buffers: str
) -> None:
    found = run(layer)
    assert not found.equivalent
    assert [cause.kind for cause in found.causes] == ["moving state"]
    assert re.search(f"every forward pass changes {buffers}", found.causes[0].finding)

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from gradaccum import BatchError, Objective, diagnose
from gradaccum.measurements.diagnose import Cause, Diagnosis, default_cuts
from gradaccum.measurements.subject import UnjudgedError
from gradaccum.workloads.choice import WorkloadChoice

FEATURES, CLASSES, SAMPLES = 6, 4, 12
UNEVEN, EVEN = (7, 3, 2), (4, 4, 4)
CLASSIFICATION = Objective.classification()

Window = Sequence[tuple[Tensor, Tensor]]
Step = Callable[[nn.Module, Optimizer, Window], Any]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(SAMPLES, FEATURES, generator=generator),
        torch.randint(CLASSES, (SAMPLES,), generator=generator),
    )


def network(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), *middle, nn.GELU(), nn.Linear(8, CLASSES))


def run(
    *middle: Callable[[], nn.Module],
    cuts: Sequence[Sequence[int]] = (EVEN, UNEVEN),
    step: Step | None = None,
    data: Any = None,
) -> Diagnosis:
    return diagnose(
        lambda: network(*(make() for make in middle)), CLASSIFICATION, data or batch(), cuts=cuts, step=step
    )


def the_cause(found: Diagnosis, kind: str) -> Cause:
    (cause,) = [cause for cause in found.causes if cause.kind == kind]
    return cause


def loop(weigh: Callable[[Tensor, int, int], Tensor], *, clear_each: bool = False, step_each: bool = False) -> Step:
    """A hand-written loop: `weigh(mean loss, samples, micro-batches)` is what it differentiates."""

    def step(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
        optimizer.zero_grad()
        for inputs, labels in window:
            if clear_each:
                optimizer.zero_grad()
            weigh(F.cross_entropy(model(inputs), labels), len(labels), len(window)).backward()
            if step_each:
                optimizer.step()
        if not step_each:
            optimizer.step()

    return step


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
        (loop(lambda mean, _, n: mean / 4), EVEN, "0.75 times the right gradient", 0.75),
        (loop(lambda mean, _, n: mean / 4), UNEVEN, "0.75 times a mean of means", None),
        (loop(lambda mean, s, n: mean * s / SAMPLES * (1 + (s == 7))), UNEVEN, "the gradient points elsewhere", None),
        (lambda model, optimizer, window: None, EVEN, "stepped 0 times in one window", None),
    ],
)
def test_a_wrong_loop_is_told_its_mistake(step: Step, cut: tuple[int, ...], mistake: str, norm_ratio: float) -> None:
    found = run(cuts=[cut], step=step)
    assert not found.equivalent
    assert [cause.kind for cause in found.causes] == ["loop"]
    assert re.search(mistake, found.causes[0].finding)
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


def test_a_loop_that_reports_another_loss_is_not_equivalent() -> None:
    def step(model: nn.Module, optimizer: Optimizer, window: Window) -> Tensor:
        loop(lambda mean, samples, _: mean * samples / SAMPLES)(model, optimizer, window)
        return torch.tensor(7.0)

    found = run(step=step)
    assert not found.equivalent
    assert "the loss differs" in found.causes[0].finding


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


@pytest.mark.parametrize("samples", range(2, 40))
def test_the_default_cuts_are_cuts_and_one_is_uneven(samples: int) -> None:
    cuts = default_cuts(samples)
    assert all(sum(cut) == samples and len(cut) > 1 and 0 not in cut for cut in cuts)
    assert samples < 3 or any(len(set(cut)) > 1 for cut in cuts)
    assert samples < 4 or all(min(cut) > 1 or max(cut) > 1 for cut in cuts)


def test_one_sample_cannot_be_cut() -> None:
    with pytest.raises(BatchError, match="at least two samples"):
        run(data=(torch.ones(1, FEATURES), torch.ones(1).long()))


def test_a_loop_that_hands_its_last_backward_over_as_a_closure_is_seen_whole() -> None:
    def step(model: nn.Module, optimizer: Optimizer, window: Window) -> None:
        *before, (inputs, labels) = window
        for piece, targets in before:
            (F.cross_entropy(model(piece), targets, reduction="sum") / SAMPLES).backward()

        def closure() -> Tensor:
            loss = F.cross_entropy(model(inputs), labels, reduction="sum") / SAMPLES
            loss.backward()
            return loss

        optimizer.step(closure)

    assert run(step=step).equivalent

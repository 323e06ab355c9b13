from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from gradaccum import Accumulator, Objective
from gradaccum.errors import ConfigError
from gradaccum.measurements import cuts
from gradaccum.measurements.comparison import Scale, Trace
from gradaccum.measurements.equivalence import Config, measure
from gradaccum.measurements.setup import Setup
from gradaccum.measurements.variants import Losses
from gradaccum.measurements.verdict import Difference
from gradaccum.results.outcome import Outcome

Named = dict[str, Tensor]


def config(**changes: Any) -> Config:
    given: dict[str, Any] = {
        "effective_batch": 16,
        "accum_steps": [1, 4, 16],
        "cuts": [[5, 4, 3, 4]],
        "optimizers": ["sgd", "adamw"],
        "tolerance": 1e-4,
        "precision": "float32",
    }
    return Config(**{**given, **changes})


@pytest.mark.parametrize("workload", ["digits", "dictionary", "definitions", "tests.own_workload:regression"])
def test_every_cut_of_every_workload_gives_the_full_batch(workload: str, make_setup: Callable[..., Setup]) -> None:
    outcome = measure(config(effective_batch=8, accum_steps=[2, 8], cuts=[[5, 3]]), make_setup(workload))
    assert outcome.failures == []
    assert outcome.metrics["equivalent"] is True
    assert outcome.metrics["optimizer_steps_per_window"] == 1
    assert outcome.metrics["max_grad_rel_diff_float64"] < 1e-14
    assert outcome.metrics["max_grad_diff"] < 1e-5
    assert outcome.metrics["undivided_rejected"]
    assert outcome.metrics["mean_of_means_rejected"]


def test_agreement_is_told_in_one_sentence_and_only_where_there_is_agreement(
    monkeypatch: pytest.MonkeyPatch, setup: Setup
) -> None:
    told = re.compile(r"All 8 cuts under sgd and adamw are the full batch's step: .* steps once a window")
    assert told.match(measure(config(), setup).findings[0])
    monkeypatch.setattr(cuts, "scaled", cuts.mean_of_means)
    assert not any(map(told.match, measure(config(), setup).findings))


def test_the_table_tells_controls_from_cuts(setup: Setup) -> None:
    rows = measure(config(), setup).summary
    rejected = {row["optimizer"] for row in rows if row["verdict"] == "rejected"}
    assert rejected == {"control: undivided", "control: mean_of_means"}


def test_two_measurements_are_identical(setup: Setup) -> None:
    assert measure(config(), setup) == measure(config(), setup)


def test_every_cut_under_every_optimizer_is_a_point(setup: Setup) -> None:
    points = measure(config(), setup).curve.points
    assert [(point["series"], point["accum_steps"]) for point in points] == [
        *(("sgd", steps) for steps in (1, 4, 16)),
        ("sgd/uneven", 4),
        *(("adamw", steps) for steps in (1, 4, 16)),
        ("adamw/uneven", 4),
        ("control/undivided", 16),
        ("control/mean_of_means", 4),
    ]
    uneven = points[3]
    assert (uneven["micro_batch"], uneven["cut"]) == (None, [5, 4, 3, 4])


# Each breaks the engine in one way that people do by accident.


def not_divided(step: Callable[..., Any], self: Accumulator, window: Sequence[Any]) -> Any:
    return step(_with_count(self, lambda _: 1.0 / len(window)), window)


def divided_by_micro_batches(step: Callable[..., Any], self: Accumulator, window: Sequence[Any]) -> Any:
    original = self.objective
    means = Objective(lambda m, b: original.loss_sum(m, b) / original.count(b), lambda _: 1)
    return step(_with_objective(self, means), window)


def stepped_twice(step: Callable[..., Any], self: Accumulator, window: Sequence[Any]) -> Any:
    result = step(self, window)
    self.optimizer.step()
    return result


def _with_count(accumulator: Accumulator, count: Callable[[Any], float]) -> Accumulator:
    return _with_objective(accumulator, Objective(accumulator.objective.loss_sum, count))


def _with_objective(accumulator: Accumulator, objective: Objective) -> Accumulator:
    accumulator.objective = objective
    return accumulator


@pytest.mark.parametrize(
    ("breakage", "told"),
    [
        (not_divided, "the gradient of .* differs"),
        (divided_by_micro_batches, r"cut 5\+4\+3\+4: in float64 the gradient"),
        (stepped_twice, "step counter differs|stepped 2 times"),
    ],
)
def test_a_broken_engine_fails_the_claim(
    monkeypatch: pytest.MonkeyPatch, setup: Setup, breakage: Callable[..., Any], told: str
) -> None:
    step = Accumulator.step
    monkeypatch.setattr(Accumulator, "step", lambda self, window: breakage(step, self, window))
    outcome = measure(config(), setup)
    assert outcome.metrics["equivalent"] is False
    assert any(re.search(told, failure) for failure in outcome.failures)


def divided_twice(model: Any, optimizer: Any, window: Any, *, objective: Objective, clip_norm: float | None) -> Tensor:
    losses, totals = Losses(objective), objective.totals(window)
    optimizer.zero_grad()
    for batch in window:
        (losses.divided(model, batch, totals) / len(window)).backward()
    optimizer.step()
    return losses.over_targets()


@pytest.mark.parametrize(
    ("loop", "ratio", "named"),
    [
        (cuts.naive, "4", "the loss is not divided by the 4 accumulation steps; the gradient's norm is 4 times"),
        (divided_twice, "0.25", "the loss is divided twice by the 4 accumulation steps; the gradient's norm is 0.25"),
    ],
)
def test_a_wrong_divisor_shows_as_a_ratio_of_norms_and_is_named_by_evidence(
    monkeypatch: pytest.MonkeyPatch, setup: Setup, loop: Callable[..., Tensor], *, ratio: str, named: str
) -> None:
    monkeypatch.setattr(cuts, "scaled", loop)
    outcome = measure(config(accum_steps=[1, 4], cuts=[[5, 4, 3, 4]], optimizers=["sgd"]), setup)
    told = re.compile(rf"sgd, cut 4x4: .*ratio of norms {re.escape(ratio)}\)")
    assert any(map(told.match, outcome.failures))
    assert any(named in finding for finding in outcome.findings)


def test_a_blind_comparison_fails(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setattr(cuts, "naive", cuts.scaled)
    outcome = measure(config(), setup)
    assert outcome.metrics["undivided_rejected"] is False
    assert any("the control undivided" in failure and "blind" in failure for failure in outcome.failures)


@pytest.mark.parametrize("optimizers", [["sgd"], ["adamw"]])
def test_one_optimizer_is_enough(setup: Setup, optimizers: list[str]) -> None:
    assert measure(config(optimizers=optimizers, cuts=[]), setup).failures == []


def test_clipping_is_compared_too(make_setup: Callable[..., Setup]) -> None:
    optimizers = {"sgd": {"lr": 0.1, "clip_norm": 0.01}, "adamw": {"lr": 1e-3, "clip_norm": 0.01}}
    outcome = measure(config(), make_setup(optimizers=optimizers))
    assert outcome.failures == []
    assert outcome.metrics["max_grad_rel_diff_float64"] > 0


def test_a_kinked_unit_is_reported_with_both_distances_to_the_truth(
    monkeypatch: pytest.MonkeyPatch, setup: Setup
) -> None:
    between = Difference.between

    def flip(trace: Trace, reference: Trace, scale: Scale) -> Difference:
        found = between(trace, reference, scale)
        in_float32 = 1e-10 < found.grad_rel_diff < 1e-3
        return replace(found, max_grad_diff=1e-3, grad_rel_diff=1e-3) if in_float32 else found

    monkeypatch.setattr(Difference, "between", staticmethod(flip))
    outcome = measure(config(optimizers=["sgd"]), setup)
    assert outcome.metrics["kinks"] > 0
    assert outcome.metrics["equivalent"] is True
    assert any("a kink" in finding and "full batch" in finding for finding in outcome.findings)


def test_metrics_are_finite_and_flat(setup: Setup) -> None:
    outcome: Outcome = measure(config(), setup)
    assert all(isinstance(value, bool | int | float) for value in outcome.metrics.values())


def test_bf16_sums_are_shown_to_lose_what_a_float32_buffer_keeps(make_setup: Callable[..., Setup]) -> None:
    config = Config(effective_batch=4, accum_steps=(2,), cuts=(), optimizers=("sgd",), tolerance=1e-4, precision="bf16")
    outcome = measure(config, make_setup("digits"))
    errors = {name: outcome.metrics[f"bf16_grad_error_{name}"] for name in ("full_batch", "bf16_sums", "float32_sums")}
    assert not outcome.failures
    assert errors["float32_sums"] <= 2 * errors["full_batch"]
    assert errors["float32_sums"] < 0.02
    assert errors["bf16_sums"] > 0.2
    (told,) = [finding for finding in outcome.findings if finding.startswith("bf16 over 512 micro-batches")]
    assert f"in bf16 end {errors['bf16_sums']:.1%} from" in told
    assert f"in a float32 buffer {errors['float32_sums']:.1%}" in told
    assert told.endswith("Set accum_dtype=torch.float32.")


def test_the_contrastive_workload_fails_with_its_cause(make_setup: Callable[..., Setup]) -> None:
    config = Config(
        effective_batch=8, accum_steps=(2,), cuts=(), optimizers=("sgd",), tolerance=1e-4, precision="float32"
    )
    outcome = measure(config, make_setup("contrastive"))
    assert outcome.failures
    assert any(finding.startswith("not separable: ") and "negatives" in finding for finding in outcome.findings)


def test_a_learning_rate_that_no_step_survives_is_named(make_setup: Callable[..., Setup]) -> None:
    setup = make_setup(optimizers={"sgd": {"lr": 1e300}, "adamw": {"lr": 0.1}})
    with pytest.raises(ConfigError, match=r"Lower optimizers\.sgd\.lr"):
        measure(config(), setup)

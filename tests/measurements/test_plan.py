from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from gradaccum.config import section
from gradaccum.errors import ConfigError
from gradaccum.measurements.bench import Bench
from gradaccum.measurements.candidates import predictor
from gradaccum.measurements.plan import Config, measure
from gradaccum.measurements.plan_results import command
from gradaccum.measurements.ranking import Candidate
from gradaccum.measurements.setup import Setup
from gradaccum.measurements.window_memory import Window, predict
from gradaccum.results.step_costs import StepCosts

SECTION = {"target_effective_batch": 48, "memory_bytes": 2**30, "memory_device": "cpu", "world_size": 1}
COSTS = StepCosts("digits", "sgd", 0.5, {1: 0.2, 16: 0.4, 48: 1.0}, 64, extrapolation_error=0.05, frontier_ms=30.0)


def config(**changes: Any) -> Config:
    return section({"plan": {**SECTION, **changes}}, "plan", Config)


def test_candidates_cut_each_rank_s_share_equally_one_a_doubling() -> None:
    assert config().micro_batches() == [1, 3, 6, 12, 24, 48]
    assert config(world_size=4).micro_batches() == [1, 3, 6, 12]
    assert config(target_effective_batch=510).micro_batches() == [1, 3, 6, 15, 30, 51, 102, 255, 510]
    assert config(target_effective_batch=7).micro_batches() == [1, 7]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_effective_batch": 2**30 + 1}, "plan.target_effective_batch = 1073741825 .* or equal to 1073741824"),
        ({"world_size": 10**12}, "plan.world_size = 1000000000000 .* or equal to 1073741824"),
        ({"memory_bytes": 8}, r"plan.memory_bytes: 8 B is no memory .* Did you mean 8589934592 \(8 GiB\)\?"),
        ({"memory_bytes": 2**60}, r"plan.memory_bytes: 1.049e\+06 TiB is no memory"),
    ],
)
def test_numbers_that_no_machine_has_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(**changes)


@pytest.mark.parametrize(
    ("target", "ranks", "said"),
    [
        (2, 4, r"smaller than world_size=4, .* Nearest that work: 2 on 2 ranks, or 4 on 4\."),
        (1, 4, r"Nearest that work: 1 on 1 rank, or 4 on 4\."),
        (510, 4, r"not a multiple of world_size=4, .* Nearest that work: 508 or 512 on 4 ranks, or 510 on 3\."),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_that_does(target: int, ranks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(target_effective_batch=target, world_size=ranks)


def test_the_plan_is_proposed_with_memory_time_and_the_line_that_measures_it(setup: Setup) -> None:
    result = measure(config(), setup, costs=COSTS)
    assert result.metrics["micro_batch"] == 48
    assert result.metrics["accum_steps"] == 1
    assert result.metrics["predicted_step_ms"] == pytest.approx(1.5)
    assert result.metrics["predicted_samples_per_sec"] == pytest.approx(32_000)
    assert result.findings[-1] == (
        "Measure it: dvc exp run -S workload.name=digits -S throughput.micro_batch=48 "
        "-S 'throughput.accum_steps=[1,2,4,8,16]' -S throughput.seconds=6 throughput"
    )
    assert [point["accum_steps"] for point in result.curve.points] == [1, 2, 4, 8, 16, 48]
    assert [point["micro_batch"] for point in result.curve.points if point["chosen"]] == [48]


def line(micro: int, steps: int, costs: StepCosts = COSTS) -> str:
    return command(Candidate(micro * steps, micro, 1, 1, 1, None), "digits", costs)


def test_the_line_measures_enough_points_for_a_fit_and_no_more_than_say_something() -> None:
    assert "=[1,2,3,4,8,16]'" in line(48, 3)
    assert "=[1,2,4,8,16,17]'" in line(1, 17)
    assert "=[1,2,4,8,16,32,64,128,256]'" in line(1, 10**6)


def test_the_line_allows_the_time_that_its_points_take() -> None:
    assert "throughput.seconds=6 " in line(48, 1)
    slow = replace(COSTS, t_micro_ms={1: 100.0}, frontier_ms=2000.0)
    steps = [1, 2, 4, 8, 16]
    assert f"throughput.seconds={math.ceil(10 * (2 + sum(0.1 * each + 0.0005 for each in steps)))} " in line(
        1, 16, slow
    )


def test_a_time_beyond_what_was_measured_is_marked(setup: Setup) -> None:
    result = measure(config(target_effective_batch=96), setup, costs=COSTS)
    shown = {row["micro-batch"]: row["ms/step"] for row in result.summary}
    assert shown[48] == "2.5"
    assert shown[96] == "~2.5"
    assert any(finding.startswith("~ marks micro-batches outside the 1 to 48 measured") for finding in result.findings)
    assert not any("~" in finding for finding in measure(config(), setup, costs=COSTS).findings)


@pytest.mark.parametrize(("target", "ranks", "nearby"), [(509, 1, 512), (1018, 2, 1024), (13, 1, 12)])
def test_a_share_that_can_hardly_be_cut_is_said_with_one_that_can(target: int, ranks: int, nearby: int) -> None:
    said = config(target_effective_batch=target, world_size=ranks).better_cut()
    assert said is not None
    assert f"micro-batches of 1 or {target // ranks} alone; a target of {nearby} leaves" in said


@pytest.mark.parametrize("target", [1, 2, 3, 48, 510, 512, 1001])
def test_a_share_that_can_be_cut_is_left_alone(target: int) -> None:
    assert config(target_effective_batch=target).better_cut() is None


def test_what_a_cuda_budget_leaves_out_is_said(setup: Setup) -> None:
    there, here = (measure(config(memory_device=device), setup).findings[1] for device in ("cuda", "cpu"))
    assert "may take 922 MiB; 10% is left free, for what cannot be predicted: CUDA's context" in there
    assert "CUDA" not in here


def test_less_memory_gives_a_smaller_micro_batch_and_more_steps(make_setup: Callable[..., Setup]) -> None:
    setup = make_setup("digits_cnn")
    bench = Bench.prepare(setup)
    needed, _ = predictor(bench, config(), setup, optimizer="sgd")(12, 4)
    costs = replace(COSTS, workload="digits_cnn")
    result = measure(config(memory_bytes=int(needed / 0.9) + 1), setup, costs=costs)
    assert result.metrics["micro_batch"] == 12
    assert result.metrics["accum_steps"] == 4
    assert "-S throughput.micro_batch=12 " in result.findings[-1]


def test_memory_is_that_of_the_whole_window_though_two_micro_batches_are_gone_through(setup: Setup) -> None:
    bench = Bench.prepare(setup)
    bytes_of = predictor(bench, config(), setup, optimizer="adamw")
    for micro, steps in ((48, 1), (24, 2), (6, 8), (1, 48)):
        whole = predict(bench, Window(micro, steps, setup.optimizers.adamw))
        assert bytes_of(micro, steps) == pytest.approx((whole.total, whole.by_kind["inputs"]), rel=1e-3)


def test_several_ranks_hold_one_gradient_more_and_it_is_said(setup: Setup) -> None:
    bench = Bench.prepare(setup)
    one, four = (predictor(bench, config(world_size=ranks), setup, optimizer="sgd")(12, 1)[0] for ranks in (1, 4))
    assert four - one == 104488
    result = measure(config(world_size=4), setup, costs=COSTS)
    assert any("Reducing gradients over ranks" in finding for finding in result.findings)


def test_what_is_frozen_and_buffers_are_not_reduced(setup: Setup) -> None:
    def frozen() -> nn.Module:
        model = nn.Sequential(nn.Linear(64, 1024).requires_grad_(False), nn.BatchNorm1d(1024), nn.Linear(1024, 10))
        model[1].requires_grad_(False)
        return model

    bench = Bench.prepare(setup)
    bench = replace(bench, workload=replace(bench.workload, make_model=frozen))
    one, four = (predictor(bench, config(world_size=ranks), setup, optimizer="sgd")(12, 1)[0] for ranks in (1, 4))
    assert four - one == 4 * (1024 * 10 + 10)


def test_times_of_another_workload_are_not_passed_off_as_this_one_s(make_setup: Callable[..., Setup]) -> None:
    result = measure(config(target_effective_batch=4), make_setup("digits_cnn"), costs=COSTS)
    assert result.metrics["predicted_step_ms"] is None
    assert result.metrics["micro_batch"] == 4
    assert "No times of this workload were measured" in result.findings[-1]
    assert result.findings[-1].endswith("dvc exp run -S workload.name=digits_cnn -S throughput.seconds=120 throughput")
    assert "memory with adamw" in result.findings[0]


def test_a_plan_needs_no_measured_times(setup: Setup) -> None:
    assert measure(config(target_effective_batch=4), setup).metrics["micro_batch"] == 4


def test_a_model_that_does_not_fit_is_refused_with_what_would(setup: Setup) -> None:
    with pytest.raises(ConfigError, match=r"no plan fits: .* Nearest that works: \d+ bytes"):
        measure(config(memory_bytes=2**16), setup)

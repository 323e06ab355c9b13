from __future__ import annotations

from dataclasses import replace

import pytest

from gradaccum.results.step_costs import StepCosts

FRONTIER = [
    {"workload": "digits", "optimizer": "sgd", "micro_batch": "16", "t_micro_ms": "4.0", "median_step_ms": "8.5"},
    {"workload": "digits", "optimizer": "sgd", "micro_batch": "1", "t_micro_ms": "1.0", "median_step_ms": "32.5"},
    {"workload": "digits", "optimizer": "sgd", "micro_batch": "4", "t_micro_ms": "2.0", "median_step_ms": "16.5"},
]
COSTS = StepCosts.of(FRONTIER, {"t_step_ms": 0.5, "flattens_at_effective_batch": 64, "extrapolation_error": 0.1})


def test_costs_are_read_as_the_throughput_stage_writes_them() -> None:
    assert (COSTS.workload, COSTS.optimizer) == ("digits", "sgd")
    assert COSTS.t_micro_ms == {1: 1.0, 4: 2.0, 16: 4.0}
    assert (COSTS.extrapolation_error, COSTS.frontier_ms) == (0.1, 57.5)


def test_what_was_measured_spans_the_sizes_between_the_least_and_the_largest() -> None:
    assert [COSTS.spans(micro) for micro in (1, 3, 16, 17)] == [True, True, True, False]


def test_a_step_is_its_micro_batches_and_what_is_paid_once() -> None:
    assert COSTS.step_ms(4, 10) == pytest.approx(20.5)


@pytest.mark.parametrize(("micro", "time"), [(1, 1.0), (2, 2**0.5), (4, 2.0), (8, 2 * 2**0.5), (16, 4.0)])
def test_between_measured_sizes_time_follows_a_power_law(micro: int, time: float) -> None:
    assert COSTS.micro_ms(micro) == pytest.approx(time)


def test_above_the_measured_sizes_every_sample_takes_what_it_took_at_the_largest() -> None:
    assert COSTS.micro_ms(64) == pytest.approx(16.0)


def test_below_the_measured_sizes_nothing_is_gained() -> None:
    fewer = replace(COSTS, t_micro_ms={4: 2.0, 16: 4.0})
    assert fewer.micro_ms(1) == 2.0

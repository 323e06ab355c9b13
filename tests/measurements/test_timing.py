from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gradaccum.engine.accumulator import Accumulator
from gradaccum.engine.batching import BatchPlan
from gradaccum.errors import ConfigError
from gradaccum.measurements.bench import Bench
from gradaccum.measurements.points import Point, TimedStep, Visit, disturbance
from gradaccum.measurements.setup import Setup
from gradaccum.measurements.timing import (
    Timer,
    repeat_disturbed,
    shuffled_rounds,
    visit_all,
    within,
)

PLAN = BatchPlan(12, 4)
FINE = BatchPlan(12, 1)


def visit(*wall_ms: float, cpu_share: float = 1.0) -> Visit:
    result: Any = SimpleNamespace(loss=1.0, samples=12, sync_calls=1, applied=True)
    return Visit(PLAN, tuple(TimedStep(result, each) for each in wall_ms), cpu_share)


def test_every_round_visits_every_point_once_in_an_order_of_its_own() -> None:
    plans = [BatchPlan(4 * steps, 4) for steps in range(1, 11)]
    rounds = shuffled_rounds(plans, 3, seed=7)
    cut = [rounds[start : start + 10] for start in (0, 10, 20)]
    assert all(set(each) == set(plans) for each in cut)
    assert cut[0] != cut[1] != cut[2]
    assert rounds == shuffled_rounds(plans, 3, seed=7)


def test_everything_is_visited_once_even_without_time_and_again_only_with_it() -> None:
    order = ["a", "b", "b", "a"]
    for has_time, expected in ((False, order[:2]), (True, order)):
        seen: list[str] = []

        def go(each: str, seen: list[str] = seen) -> Visit:
            seen.append(each)
            return visit(1.0)

        points = visit_all(order, go, lambda has_time=has_time: has_time)
        assert seen == expected
        assert [len(point.visits) for point in points] == [len(expected) // 2] * 2


def test_a_visit_without_a_cpu_of_its_own_is_disturbed() -> None:
    assert visit(1.0, cpu_share=0.5).disturbed([visit(1.0)])
    assert not visit(1.0, cpu_share=0.99).disturbed([visit(1.0)])


def test_a_visit_that_is_much_slower_than_the_best_one_is_disturbed() -> None:
    calm, slow = visit(1.0, 1.1, 1.0), visit(1.5, 1.4, 1.5)
    assert slow.disturbed([calm, slow])
    assert not calm.disturbed([calm, slow])


def test_one_slow_step_among_many_disturbs_nothing() -> None:
    calm = visit(1.0, 1.0, 1.0, 50.0)
    assert not calm.disturbed([calm, visit(1.0, 1.0, 1.0, 1.0)])


def test_a_disturbed_visit_is_timed_again_replaced_and_counted() -> None:
    calm, slow, new = visit(1.0), visit(9.0), visit(1.1)
    point = repeat_disturbed([calm, slow], lambda: new, lambda: True)
    assert point.visits == (calm, new)
    assert point.disturbed == 1


def test_most_visits_disturbed_ask_for_a_quieter_machine_and_none_for_nothing() -> None:
    calm, half, most = (Point(PLAN, (visit(1.0), visit(1.0)), disturbed) for disturbed in (0, 1, 2))
    assert disturbance([calm, calm]) is None
    assert str(disturbance([calm, most])).startswith("The machine disturbed 2 of 4 visits")
    assert not str(disturbance([calm, most])).endswith("quieter machine.")
    assert str(disturbance([half, most])).endswith("That is most of them: measure again on a quieter machine.")


def test_a_repeat_that_is_disturbed_too_does_not_replace_a_better_visit() -> None:
    calm, slow = visit(1.0), visit(9.0)
    point = repeat_disturbed([calm, slow], lambda: visit(20.0), lambda: True)
    assert point.visits == (calm, slow)
    assert point.disturbed == 1


def test_nothing_is_repeated_once_the_time_is_used_up() -> None:
    calm, slow = visit(1.0), visit(9.0)
    point = repeat_disturbed([calm, slow], lambda: pytest.fail("timed again"), lambda: False)
    assert point.visits == (calm, slow)
    assert point.disturbed == 1


def test_undisturbed_visits_are_left_alone() -> None:
    point = repeat_disturbed([visit(1.0), visit(1.05)], lambda: pytest.fail("timed again"), lambda: True)
    assert point.disturbed == 0


def test_a_point_s_spread_is_that_of_its_rounds_medians() -> None:
    point = repeat_disturbed([visit(1.0, 1.0, 5.0), visit(1.1, 1.1, 1.1)], iter_visits().__next__, lambda: True)
    assert point.round_spread == pytest.approx(0.1 / 1.1)


def test_samples_a_second_are_those_of_the_median_step_which_one_slow_step_does_not_move() -> None:
    point = Point(PLAN, (visit(2.0, 2.0, 90.0), visit(2.0, 2.0)), disturbed=0)
    assert point.samples_per_sec == pytest.approx(12 / 0.002)


def iter_visits() -> Iterator[Visit]:
    yield from ()


def test_steps_are_as_asked_where_the_time_suffices() -> None:
    assert within(10, {PLAN: 0.01, FINE: 0.1}, {PLAN: 25, FINE: 5}, repeats=3) == {PLAN: 25, FINE: 5}


def test_every_point_takes_fewer_steps_where_it_does_not_and_none_takes_no_step() -> None:
    expected = {PLAN: 0.01, FINE: 0.1}
    fewer = within(1.5, expected, {PLAN: 25, FINE: 5}, repeats=3)
    assert 1 <= fewer[FINE] < 5
    assert 1 <= fewer[PLAN] < 25
    warm_up = 2 * 2 * (0.01 / 3 + 0.1 / 12)
    assert 3 * (warm_up + sum(count * expected[plan] for plan, count in fewer.items())) <= 1.5
    assert within(0.2, expected, {PLAN: 25, FINE: 5}, repeats=3) == {PLAN: 1, FINE: 1}


def test_a_time_in_which_not_every_point_can_be_seen_is_refused_with_one_in_which_all_can() -> None:
    with pytest.raises(
        ConfigError,
        match=r"takes about 2\.9 s, .* = 1 preparing took 0 s already\. Set it to 18 for all 3 rounds, to 6",
    ) as it:
        within(1.0, {PLAN: 0.1, FINE: 2.0}, {PLAN: 25, FINE: 5}, repeats=3)
    assert str(it.value).endswith("longest (micro-batch x N): 1 x 12, 4 x 3.")
    within(5, {PLAN: 0.1, FINE: 2.0}, {PLAN: 25, FINE: 5}, repeats=3)


def test_the_advised_time_counts_what_was_spent_before_and_exceeds_the_one_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"about 0\.0187 s, .* = 2 preparing took 2 s already\. Set it to 5 for all 2 rounds, to 5 for",
    ):
        within(0.0, {PLAN: 0.008}, {PLAN: 25}, repeats=2, spent=2.0)


def test_a_sweep_that_cannot_be_timed_is_known_from_its_smallest_micro_batches(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [BatchPlan(64, micro) for micro in (16, 1, 4, 64)]
    timer = Timer(Bench.prepare(setup), setup.optimizers.settings("sgd"), dict.fromkeys(plans, 1))
    tried: list[int] = []

    def a_second_a_sample(plan: BatchPlan, num_steps: int) -> Visit:
        tried.append(plan.micro_batch)
        return visit(*[1000.0 * plan.effective_batch] * num_steps)

    monkeypatch.setattr(timer, "visit", a_second_a_sample)
    assert timer.expected_seconds(plans, at_most=100) == dict.fromkeys(plans, 64)
    assert tried == [1, 4]
    assert timer.expected_seconds(plans, at_most=1000) == dict.fromkeys(plans, 64)
    assert tried[2:] == [1, 4, 16, 64]


def test_what_warms_up_is_short_however_many_micro_batches_a_step_has(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    step = Accumulator.step
    monkeypatch.setattr(Accumulator, "step", lambda self, window: lengths.append(len(window)) or step(self, window))
    timer = Timer(Bench.prepare(setup), setup.optimizers.settings("sgd"), {FINE: 2, BatchPlan(4, 4): 2})
    timer.visit(FINE, 2)
    assert lengths == [2, 2, 12, 12]
    timer.visit(BatchPlan(4, 4), 2)
    assert lengths[4:] == [1, 1, 1, 1]


def test_a_visit_times_whole_steps_each_after_the_last(setup: Setup) -> None:
    timer = Timer(Bench.prepare(setup), setup.optimizers.settings("sgd"), {PLAN: 3})
    visit = timer.visit(PLAN, 3)
    assert [step.result.samples for step in visit.steps] == [12, 12, 12]
    assert all(each > 0 for each in visit.wall_ms)
    assert visit.cpu_share > 0
    losses = [float(step.result.loss) for step in visit.steps]
    assert losses == [float(step.result.loss) for step in timer.visit(PLAN, 3).steps]


def test_garbage_is_not_collected_while_the_clock_runs(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Timer(Bench.prepare(setup), setup.optimizers.settings("sgd"), {PLAN: 2})
    collecting: list[bool] = []
    monkeypatch.setattr(timer, "wait", lambda: collecting.append(gc.isenabled()))
    timer.visit(PLAN, 2)
    assert collecting == [False] * 4
    assert gc.isenabled()

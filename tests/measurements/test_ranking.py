from __future__ import annotations

import pytest

from gradaccum.errors import ConfigError
from gradaccum.measurements.ranking import Candidate, Ranking

TIMES = {1: 100.0, 4: 40.0, 16: 20.0, 64: 19.9, 256: 30.0}


def candidates(times: dict[int, float] | None = TIMES, *, inputs: int = 10) -> list[Candidate]:
    return [Candidate(256, micro, 1, 100 * micro, inputs * micro, times and times[micro]) for micro in TIMES]


def order(memory: int, times: dict[int, float] | None = TIMES) -> list[int]:
    return [each.micro_batch for each in Ranking.of(candidates(times), memory).ranked]


def test_the_smallest_micro_batch_that_is_nearly_the_fastest_stands_first() -> None:
    assert order(10**6) == [16, 64, 256, 4, 1]


def test_what_does_not_fit_with_headroom_stands_last_however_fast() -> None:
    assert order(1700) == [4, 1, 16, 64, 256]
    assert order(int(1600 / 0.9) + 1)[0] == 16


def test_without_times_the_largest_that_fits_stands_first() -> None:
    assert order(10**4, None) == [64, 16, 4, 1, 256]


def test_a_time_is_given_as_samples_a_second() -> None:
    assert candidates()[1].samples_per_sec == pytest.approx(256 / 0.04)
    assert candidates()[1].accum_steps == 64
    assert candidates(None)[1].samples_per_sec is None


def test_every_candidate_s_place_has_its_reason() -> None:
    ranking = Ranking.of(candidates(), 10**4)
    assert {each.micro_batch: ranking.reason(each) for each in ranking.ranked} == {
        16: "proposed: 0.5% off fastest",
        64: "+0.5% speed, 4x memory",
        4: "takes 2x as long",
        1: "takes 5x as long",
        256: "does not fit",
    }
    alike = Ranking.of(candidates(dict.fromkeys(TIMES, 20.0)), 10**4)
    assert alike.reason(alike.ranked[0]) == "proposed: the fastest"
    assert alike.reason(alike.ranked[1]) == "no faster, 4x memory"
    untimed = Ranking.of(candidates(None), 10**4)
    assert untimed.reason(untimed.ranked[0]) == "proposed: the largest that fits"
    assert untimed.reason(untimed.ranked[1]) == "fits, smaller than need be"


def test_no_place_is_told_as_a_power_of_ten() -> None:
    slow = Ranking.of(candidates({1: 4372.0, 4: 2000.0, 16: 10.0, 64: 9.9, 256: 9.9}), 10**6)
    assert {each.micro_batch: slow.reason(each) for each in slow.ranked[-2:]} == {
        4: "takes 200x as long",
        1: "takes 440x as long",
    }


def test_where_nothing_fits_the_memory_that_would_do_is_named() -> None:
    with pytest.raises(ConfigError, match=r"world_size=1, needs 100 B, and 100 B less .* smaller model.* works: 112 b"):
        Ranking.of(candidates(), 100)
    with pytest.raises(ConfigError, match=r"the step's own samples, so a smaller target or more ranks help"):
        Ranking.of(candidates(inputs=60), 100)
    assert Ranking.of(candidates(), 112).chosen.micro_batch == 1

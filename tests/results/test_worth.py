from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from gradaccum.results.curve import Curve
from gradaccum.results.sentences import nothing_to_compare
from gradaccum.results.worth import targets, why_untimed, worth_section, worth_sentences, worth_table
from tests.results.made_up_metrics import ARM, EFFICIENCY, between

THROUGHPUT = {**between("flattens_at_effective_batch", (16, None, None)), "max_rel_residual": 0.02}
QUIET = {"rounds": 3, "disturbed_visits": 0}


def point(number: int, *, series: str = "sgd", micro_batch: int = 4, **fields: Any) -> dict[str, Any]:
    return {
        "series": series,
        "effective_batch": micro_batch * number,
        "accum_steps": number,
        "micro_batch": micro_batch,
        "world_size": 1,
        **fields,
    }


def trained(number: int, samples: float | None, **fields: Any) -> dict[str, Any]:
    low, high = (None, None) if samples is None else (0.5 * samples, 2 * samples)
    return point(number, **{**ARM, **between("samples_to_target", (samples, low, high)), **fields})


def curves(trained_points: list[dict[str, Any]], timed_points: list[dict[str, Any]]) -> dict[str, Curve]:
    return {
        "efficiency": Curve("efficiency", "effective_batch", tuple(trained_points)),
        "throughput": Curve("throughput", "effective_batch", tuple(QUIET | each for each in timed_points)),
    }


def said(of: dict[str, Curve], *, efficiency: dict[str, Any] = EFFICIENCY, **throughput: Any) -> Iterator[str]:
    rows = worth_table(of["efficiency"], of["throughput"])
    return worth_sentences(rows, of, {"efficiency": efficiency, "throughput": THROUGHPUT | throughput})


def test_the_answer_comes_after_the_warning_that_the_times_are_noise() -> None:
    of = curves([trained(1, 100.0)], [point(1, samples_per_sec=10.0)])
    warning, answer, *_ = said(of, max_rel_residual=0.3)
    assert "these times are worth little" in warning
    assert answer == next(said(of))


def test_time_to_the_target_is_samples_over_the_measured_rate_with_its_interval() -> None:
    of = curves(
        [trained(1, 100.0), trained(4, 150.0), trained(16, None)],
        [point(1, samples_per_sec=10.0), point(4, samples_per_sec=30.0), point(16, samples_per_sec=50.0)],
    )
    rows = worth_table(of["efficiency"], of["throughput"])
    assert [row["seconds_to_target"] for row in rows] == [10.0, 5.0, None]
    assert [row["seconds_to_target_high"] for row in rows] == [20.0, 10.0, None]
    told = " ".join(said(of))
    assert (
        "Loss 0.2, which every arm reaches that costs no quality, is reached soonest at effective batch 16: "
        "in 5 (2.5 to 10) s, after 150 samples."
    ) in told
    assert "Loss 0.4, which every arm reaches that did not fail, is reached soonest at effective batch 64" in told
    assert why_untimed(of["efficiency"], of["throughput"]) is None


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            {"series": "adamw"},
            "throughput timed optimizer=adamw, efficiency trained optimizer=sgd. Set throughput.optimizer to sgd.",
        ),
        (
            {"micro_batch": 8},
            "throughput timed micro_batch=8, efficiency trained micro_batch=4. Set throughput.micro_batch to 4.",
        ),
        (
            {"series": "adamw", "micro_batch": 8},
            "micro_batch=4. Set throughput.optimizer to sgd and throughput.micro_batch to 4.",
        ),
    ],
)
def test_another_optimizer_or_micro_batch_gives_no_time_and_it_is_said_what_to_set(
    other: dict[str, Any], told: str
) -> None:
    of = curves([trained(2, 100.0)], [point(2, samples_per_sec=10.0, **other)])
    assert worth_table(of["efficiency"], of["throughput"])[0]["seconds_to_target"] is None
    *_, last = said(of)
    assert last.endswith(told)


def test_arms_that_were_not_timed_are_named_beside_those_that_were() -> None:
    of = curves([trained(2, 100.0), trained(3, 100.0)], [point(2, samples_per_sec=10.0)])
    told = list(said(of))
    assert told[-1] == "Effective batches without a time: 12. Add 3 to throughput.accum_steps."
    assert any("reached soonest at effective batch 8" in each for each in told)


@pytest.mark.parametrize(
    ("flat", "good", "told"),
    [
        (
            16,
            64,
            r"4 to 16 larger is cheaper .* \(timed with micro-batches of 4 and sgd, and fitted\), up to 64 .*: take 16",
        ),
        (
            256,
            64,
            "From effective batch 4 to 256 .*, up to 64 it costs no quality .*: take 64; what a larger one would",
        ),
        (
            4,
            64,
            "From effective batch 4 on a sample costs about the same .*, up to 64 it costs no quality .*: take 4",
        ),
    ],
)
def test_one_sentence_says_from_where_to_where(flat: int, good: int, told: str) -> None:
    of = curves([trained(1, 100.0)], [point(1, samples_per_sec=10.0)])
    metrics = {**EFFICIENCY, "worth_it_up_to_effective_batch": good}
    (first, *_) = said(of, efficiency=metrics, flattens_at_effective_batch=flat)
    assert re.search(told, first)


@pytest.mark.parametrize("loss", [None, 2.29])
def test_arms_that_did_not_train_are_not_compared(loss: float | None) -> None:
    metrics = {**EFFICIENCY, "reference_validation_loss": loss}
    of = curves([trained(1, 100.0)], [point(1, samples_per_sec=10.0)])
    assert list(said(of, efficiency=metrics)) == [nothing_to_compare(metrics)]


def test_where_all_arms_are_as_good_there_is_one_target() -> None:
    assert list(targets({"target_loss": 0.2, "common_target_loss": 0.4}).items()) == [
        ("target", 0.2),
        ("common_target", 0.4),
    ]
    assert targets({"target_loss": 0.2, "common_target_loss": 0.2}) == {"target": 0.2}
    assert targets({"target_loss": None, "common_target_loss": None}) == {}


def test_where_the_curve_flattens_is_told_with_its_interval_and_for_what_was_timed() -> None:
    of = curves([trained(1, 100.0)], [point(1, samples_per_sec=10.0, micro_batch=8)])
    (first, *_) = said(of, **between("flattens_at_effective_batch", (64, 56.0, 72.0)))
    assert first.startswith(
        "From effective batch 8 to 64 (95 % interval 56 to 72) larger is cheaper per sample "
        "(timed with micro-batches of 8 and sgd, and fitted)"
    )


def test_an_arm_in_which_a_seed_failed_is_told_as_failed() -> None:
    of = curves([trained(1, 100.0), trained(4, None, failed_runs=1)], [point(1, samples_per_sec=10.0)])
    section = worth_section(
        worth_table(of["efficiency"], of["throughput"]), of, {"efficiency": EFFICIENCY, "throughput": THROUGHPUT}
    )
    assert "\n| 16 | failed | - |" in section


def test_the_table_tells_every_arm_and_what_is_not_known() -> None:
    of = curves([trained(1, 100.0), trained(4, None)], [point(1, samples_per_sec=10.0)])
    rows = worth_table(of["efficiency"], of["throughput"])
    section = worth_section(rows, of, {"efficiency": EFFICIENCY, "throughput": THROUGHPUT})
    assert (
        "| 4 | +0.02 (-0.01 to +0.05) | 10 | 100 (50 to 200) | 10 (5 to 20) | 20 (10 to 30) | 2 (1 to 3) |" in section
    )
    assert "are not what a run stopped at that loss would have needed" in section
    assert "| 16 | +0.02 (-0.01 to +0.05) | - | - | - | 20 (10 to 30) | - |" in section

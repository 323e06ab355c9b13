from __future__ import annotations

import re
from typing import Any

import pytest

from gradaccum.results.curve import Curve
from gradaccum.results.worth import worth_sentences, worth_table

EFFICIENCY = {
    "worth_it_up_to_effective_batch": 64,
    "target_loss": 0.2,
    "noise_scale": 30.0,
    "noise_scale_low": 20.0,
    "noise_scale_high": None,
}


def point(steps: int, *, series: str = "sgd", micro_batch: int = 4, **fields: Any) -> dict[str, Any]:
    return {
        "series": series,
        "effective_batch": micro_batch * steps,
        "accum_steps": steps,
        "micro_batch": micro_batch,
        "world_size": 1,
        **fields,
    }


def trained(*points: dict[str, Any]) -> Curve:
    return Curve("efficiency", "effective_batch", points)


def timed(*points: dict[str, Any]) -> Curve:
    return Curve("throughput", "effective_batch", points)


def test_time_to_the_target_is_samples_over_the_measured_rate() -> None:
    rows = worth_table(
        trained(
            point(1, samples_to_target=100.0), point(4, samples_to_target=150.0), point(16, samples_to_target=None)
        ),
        timed(point(1, samples_per_sec=10.0), point(4, samples_per_sec=30.0), point(16, samples_per_sec=50.0)),
    )
    assert [row["seconds_to_target"] for row in rows] == [10.0, 5.0, None]
    said = " ".join(worth_sentences(rows, EFFICIENCY, {"flattens_at_effective_batch": 16}))
    assert "soonest at effective batch 16: in 5 s, after 150 samples" in said


@pytest.mark.parametrize("other", [{"series": "adamw"}, {"micro_batch": 8}])
def test_another_optimizer_or_micro_batch_gives_no_time(other: dict[str, Any]) -> None:
    rows = worth_table(trained(point(2, samples_to_target=100.0)), timed(point(2, samples_per_sec=10.0, **other)))
    assert rows[0]["seconds_to_target"] is None
    said = " ".join(worth_sentences(rows, EFFICIENCY, {"flattens_at_effective_batch": 16}))
    assert "give the efficiency and throughput sections the same optimizer and micro_batch" in said


@pytest.mark.parametrize(
    ("flat", "good", "told"),
    [
        (16, 64, "From effective batch 4 to 16 larger is cheaper per sample, up to 64 it costs no quality: take 16"),
        (256, 64, "From effective batch 4 to 256 .*, up to 64 it costs no quality: take 64; what a larger one would"),
        (4, 64, "From effective batch 4 on a sample costs about the same, up to 64 it costs no quality: take 4"),
        (16, None, "none is worth it: lower the learning rate"),
    ],
)
def test_one_sentence_says_from_where_to_where(flat: int, good: int | None, told: str) -> None:
    rows = worth_table(trained(point(1, samples_to_target=100.0)), timed(point(1, samples_per_sec=10.0)))
    metrics = {**EFFICIENCY, "worth_it_up_to_effective_batch": good}
    (first, *_) = worth_sentences(rows, metrics, {"flattens_at_effective_batch": flat})
    assert re.search(told, first)


def test_a_noise_scale_without_bound_says_so() -> None:
    rows = worth_table(trained(point(1, samples_to_target=None)), timed())
    assert "30 targets (20 to no bound)" in " ".join(
        worth_sentences(rows, EFFICIENCY, {"flattens_at_effective_batch": 16})
    )

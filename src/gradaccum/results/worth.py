"""Which effective batch is worth it: what training needs in samples, joined with what samples cost in time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gradaccum.results.curve import Curve, Point
from gradaccum.results.outcome import Row, Table

Metrics = Mapping[str, Any]


def worth_table(efficiency: Curve, throughput: Curve) -> Table:
    """One row an arm; rate and time are null where the throughput stage did not time that very plan."""
    rates = {plan(point): point["samples_per_sec"] for point in throughput.points}
    return [_row(point, rates.get(plan(point))) for point in efficiency.points]


def plan(point: Point) -> tuple[Any, ...]:
    """What two measurements must share so that the time of one is that of the other."""
    return tuple(point[key] for key in ("series", "micro_batch", "accum_steps", "world_size"))


def _row(point: Point, samples_per_sec: float | None) -> Row:
    samples = point["samples_to_target"]
    return {
        "effective_batch": point["effective_batch"],
        "samples_per_sec": samples_per_sec,
        "samples_to_target": samples,
        "seconds_to_target": samples / samples_per_sec if samples and samples_per_sec else None,
    }


def worth_sentences(rows: Table, efficiency: Metrics, throughput: Metrics) -> Iterator[str]:
    """From where to where a larger batch is cheaper, up to where it costs no quality, and which is fastest."""
    least = min(row["effective_batch"] for row in rows)
    flat, good = throughput["flattens_at_effective_batch"], efficiency["worth_it_up_to_effective_batch"]
    if good is None:
        yield "No effective batch trained well here, so none is worth it: lower the learning rate, and measure again."
        return
    cheaper = f"From effective batch {least} to {flat} larger is cheaper per sample"
    if flat <= least:
        cheaper = f"From effective batch {least} on a sample costs about the same"
    yield f"{cheaper}, up to {good} it costs no quality: {_choice(max(flat, least), good)}"
    if efficiency["noise_scale"] is not None:
        high = efficiency["noise_scale_high"]
        yield (
            f"The gradient noise scale is {efficiency['noise_scale']:.3g} targets ({efficiency['noise_scale_low']:.3g} "
            f"to {'no bound' if high is None else f'{high:.3g}'}): well below it a larger batch takes fewer steps for "
            "as many samples, well above it more samples for as many steps."
        )
    timed = [row for row in rows if row["seconds_to_target"] is not None]
    if timed:
        fastest = min(timed, key=lambda row: float(row["seconds_to_target"]))
        yield (
            f"Loss {efficiency['target_loss']:.3g} is reached soonest at effective batch {fastest['effective_batch']}: "
            f"in {fastest['seconds_to_target']:.2g} s, after {fastest['samples_to_target']:.0f} samples."
        )
    else:
        yield (
            "No time to the target loss: give the efficiency and throughput sections the same optimizer and "
            "micro_batch, and accum_steps in common."
        )


def _choice(flat: int, good: int) -> str:
    if good >= flat:
        return f"take {flat}, or up to {good} where fewer, larger steps help otherwise."
    return f"take {good}; what a larger one would save in time it loses in training."

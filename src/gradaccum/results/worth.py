"""Which effective batch is worth it: what training needs in samples, joined with what samples cost in time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gradaccum.results import sentences
from gradaccum.results.curve import Curve, Point
from gradaccum.results.fits import POOR
from gradaccum.results.intervals import shown
from gradaccum.results.outcome import Metrics, Row, Table

Curves = Mapping[str, Curve]

TARGETS = {
    "target": "which every arm reaches that costs no quality",
    "common_target": "which every arm reaches that did not fail",
}
ENDS = ("", "_low", "_high")

WITHIN_A_RUN = (
    "Samples and seconds to a loss are read off runs whose budget and learning-rate decay were set beforehand, and the "
    "loss off their ends: they compare arms, and are not what a run stopped at that loss would have needed."
)


def targets(efficiency: Metrics) -> dict[str, float]:
    """The loss of each target, where there is one, the second only where it is another."""
    losses = {name: efficiency[f"{name}_loss"] for name in TARGETS}
    distinct = {loss: name for name, loss in reversed(losses.items()) if loss is not None}
    return {name: loss for loss, name in reversed(distinct.items())}


def worth_table(efficiency: Curve, throughput: Curve) -> Table:
    """One row an arm; rate and times are null where the throughput stage did not time that very plan."""
    rates = {plan(point): point["samples_per_sec"] for point in throughput.points}
    return [_row(point, rates.get(plan(point))) for point in efficiency.points]


def plan(point: Point) -> tuple[Any, ...]:
    """What two measurements must share so that the time of one is that of the other."""
    return tuple(point[key] for key in ("series", "micro_batch", "accum_steps", "world_size"))


def _row(point: Point, samples_per_sec: float | None) -> Row:
    row = {key: point[key] for key in ("effective_batch", "failed_runs")} | {"samples_per_sec": samples_per_sec}
    row |= {f"loss_above_reference{end}": point[f"loss_above_reference{end}"] for end in ENDS}
    for name in (f"{target}{end}" for target in TARGETS for end in ENDS):
        samples = point[f"samples_to_{name}"]
        row[f"samples_to_{name}"] = samples
        row[f"seconds_to_{name}"] = None if samples is None or not samples_per_sec else samples / samples_per_sec
    return row


def why_untimed(efficiency: Curve, throughput: Curve) -> str | None:
    """What to set so that every arm has a time; None where each has."""
    timed = {plan(point) for point in throughput.points}
    untimed = [point for point in efficiency.points if plan(point) not in timed]
    if not untimed:
        return None
    trained, one = efficiency.points[0], throughput.points[0]
    settings = [("optimizer", "series"), ("micro_batch", "micro_batch")]
    other = [(name, trained[key], one[key]) for name, key in settings if trained[key] != one[key]]
    if other:
        here, there = (", ".join(f"{name}={values[at]}" for name, *values in other) for at in (0, 1))
        todo = " and ".join(f"throughput.{name} to {mine}" for name, mine, _ in other)
        return f"No seconds: throughput timed {there}, efficiency trained {here}. Set {todo}."
    batches, steps = (", ".join(str(point[key]) for point in untimed) for key in ("effective_batch", "accum_steps"))
    return f"Effective batches without a time: {batches}. Add {steps} to throughput.accum_steps."


def worth_section(rows: Table, curves: Curves, metrics: Mapping[str, Metrics]) -> str:
    """The answer as sentences, and the time to target of every arm as a table; Markdown."""
    lines = [f"- {line}" for line in worth_sentences(rows, curves, metrics)]
    return "\n".join([*lines, "", *_table(rows, metrics["efficiency"]), "", WITHIN_A_RUN])


def worth_sentences(rows: Table, curves: Curves, metrics: Mapping[str, Metrics]) -> Iterator[str]:
    """From where to where a larger batch is cheaper, up to where it costs no quality, and which is fastest."""
    efficiency, throughput = metrics["efficiency"], metrics["throughput"]
    nothing = sentences.nothing_to_compare(efficiency)
    if nothing:
        yield nothing
        return
    yield from filter(None, [timing_doubt(throughput, curves["throughput"])])
    yield _answer(efficiency, throughput, curves["throughput"])
    yield sentences.quality(efficiency)
    yield from filter(None, [sentences.noise_scale(efficiency)])
    yield from filter(None, (_soonest(rows, name, loss) for name, loss in targets(efficiency).items()))
    yield from filter(None, [why_untimed(curves["efficiency"], curves["throughput"])])


def timing_doubt(throughput: Metrics, curve: Curve) -> str | None:
    """Why nothing that rests on the times is to be relied on; None where it may be."""
    disturbed, visits = (sum(point[key] for point in curve.points) for key in ("disturbed_visits", "rounds"))
    reasons = []
    if throughput["max_rel_residual"] > POOR:
        reasons.append(f"they miss the model by up to {throughput['max_rel_residual']:.0%}")
    if 2 * disturbed > visits:
        reasons.append(f"the machine disturbed {disturbed} of {visits} visits")
    if not reasons:
        return None
    return (
        f"**Noise: these times are worth little**, for {' and '.join(reasons)}. What rests on them (time of a step, "
        "where it flattens, which batch is soonest) is a guess until `throughput` is measured on a quieter machine."
    )


def _answer(efficiency: Metrics, throughput: Metrics, curve: Curve) -> str:
    least = min(point["effective_batch"] for point in curve.points)
    flat, low, high = (throughput[f"flattens_at_effective_batch{end}"] for end in ENDS)
    good = efficiency["worth_it_up_to_effective_batch"]
    sure = "" if low is None else f" (95 % interval {low:.0f} to {high:.0f})"
    cheaper = f"From effective batch {least} to {flat}{sure} larger is cheaper per sample"
    if flat <= least:
        cheaper = f"From effective batch {least} on a sample costs about the same"
    at = f"micro-batches of {curve.points[0]['micro_batch']} and {curve.points[0]['series']}, and fitted"
    quality = f"up to {good} it costs no quality that {efficiency['seeds']} seeds could show"
    return f"{cheaper} (timed with {at}), {quality}: {_choice(max(flat, least), good)}"


def _choice(flat: int, good: int) -> str:
    if good >= flat:
        return f"take {flat}, or up to {good} where fewer, larger steps help otherwise."
    return f"take {good}; what a larger one would save in time it loses in training."


def _soonest(rows: Table, target: str, loss: float) -> str | None:
    timed = [row for row in rows if row[f"seconds_to_{target}"] is not None]
    if not timed:
        return None
    fastest = min(timed, key=lambda row: float(row[f"seconds_to_{target}"]))
    return (
        f"Loss {loss:.3g}, {TARGETS[target]}, is reached soonest at effective batch {fastest['effective_batch']}: in "
        f"{shown(fastest, f'seconds_to_{target}', '.2g')} s, after {fastest[f'samples_to_{target}']:.0f} samples."
    )


def _table(rows: Table, efficiency: Metrics) -> Iterator[str]:
    pairs = [(unit, name, loss) for name, loss in targets(efficiency).items() for unit in ("samples", "seconds")]
    heads = [f"{unit} to loss {loss:.3g}" for unit, _, loss in pairs]
    names = [f"{unit}_to_{name}" for unit, name, _ in pairs]
    yield " | ".join(["| effective batch | loss above the smallest arm's | samples/s", *heads]) + " |"
    yield "|---" * (3 + len(heads)) + "|"
    for row in rows:
        above = "failed" if row["failed_runs"] else shown(row, "loss_above_reference", "+.2g")
        rate = "-" if row["samples_per_sec"] is None else f"{row['samples_per_sec']:.0f}"
        times = [shown(row, name, ".0f" if name.startswith("samples") else ".2g") for name in names]
        yield "| " + " | ".join([str(row["effective_batch"]), above, rate, *times]) + " |"

"""Published claims beside what was measured here, as a page; and every arm beside the one it is compared with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradaccum.results import sentences
from gradaccum.results.curve import Curve, Point
from gradaccum.results.intervals import Interval, shown
from gradaccum.results.outcome import Metrics

NEAR = 3
"""A bend within this factor of the noise scale is of its order; ten would hold whatever arms a sweep usually has."""

DECIDES = """\
## What each arm was compared with

Validation loss at the end, on equal samples: mean over the seeds, with its 95 % interval. Arms share their seeds, so
what decides is not whether two such intervals meet, but whether that of the differences, seed by seed, excludes 0.
"""


@dataclass(frozen=True)
class Claim:
    """What a paper says, what was seen here, and whether they agree: `holds`, `in part`, `not shown`, `cannot tell`."""

    paper: str
    says: str
    here: str
    verdict: str
    figure: str


def claims(efficiency: Metrics, scaling: Metrics, arms: Sequence[int]) -> list[Claim]:
    """From both stages' `metrics.json`, and the effective batches of the efficiency stage's arms."""
    return [_linear_scaling(scaling), _noise_scale(efficiency, arms), _half_life(scaling)]


def page(all_claims: list[Claim], efficiency: Curve, scaling: Curve) -> str:
    """Markdown."""
    return "\n".join(
        ["# Published claims, at this size", "", *_lines(all_claims), "", DECIDES, *_arms(efficiency, scaling)]
    )


def _lines(all_claims: list[Claim]) -> Iterator[str]:
    yield "| paper | its claim | measured here | verdict | figure |"
    yield "|---|---|---|---|---|"
    for each in all_claims:
        yield f"| {each.paper} | {each.says} | {each.here} | **{each.verdict}** | {each.figure} |"


def _linear_scaling(scaling: Metrics) -> Claim:
    verdict, remark = _linear_verdict(scaling)
    return Claim(
        paper="Goyal et al. 2017, arXiv 1706.02677",
        says="At k times the batch, k times the learning rate keeps the small batch's result, with gradual warm-up; "
        "without warm-up it does not.",
        here=f"{sentences.linear_scaling(scaling)}{remark}",
        verdict=verdict,
        figure="linear_scaling.png",
    )


def _linear_verdict(scaling: Metrics) -> tuple[str, str]:
    """The claim's parts, each by the difference that decides it: scaled keeps the result, and both halves help."""
    if scaling["linear/base_failed_runs"]:
        return "cannot tell", ""
    if scaling["linear/warm_up_failed_runs"]:
        return "not shown", ""
    seen = {
        "that the small batch's result is kept": not scaling["linear/warm_up_is_worse"],
        "that scaling helps": scaling["linear/unscaled_is_worse"],
        "that warm-up helps": scaling["linear/no_warm_up_is_worse"],
    }
    unseen = [part for part, shown in seen.items() if not shown]
    if not unseen:
        return "holds", ""
    helped = scaling["linear/unscaled_is_worse"] or scaling["linear/no_warm_up_is_worse"]
    return "in part" if helped else "not shown", f" This size does not show {', nor '.join(unseen)}."


def _noise_scale(efficiency: Metrics, arms: Sequence[int]) -> Claim:
    here, verdict = _bend(efficiency, arms)
    return Claim(
        paper="McCandlish et al. 2018, arXiv 1812.06162",
        says="The loss reached on equal samples bends at a batch of the order of the gradient noise scale.",
        here=here,
        verdict=verdict,
        figure="noise_scale.png",
    )


def _bend(efficiency: Metrics, arms: Sequence[int]) -> tuple[str, str]:
    noise, bend = sentences.noise_scale(efficiency), efficiency["worse_from_effective_batch"]
    nothing = sentences.nothing_to_compare(efficiency)
    if nothing:
        return nothing, "cannot tell"
    if noise is None:
        return f"{sentences.quality(efficiency)} No noise scale could be told.", "cannot tell"
    told = f"{sentences.quality(efficiency)} {noise}"
    if efficiency["worse_from_failed_runs"]:
        return f"{told} It was the learning rate that was too large there, whatever the noise.", "cannot tell"
    middle = sentences.middle(efficiency)
    if middle is None or not math.isfinite(middle):
        return f"{told} In half of training no gradient stands out of the noise.", "cannot tell"
    return _near(bend, middle, arms=sorted(arms), told=told)


def _near(bend: int | None, middle: float, *, arms: Sequence[int], told: str) -> tuple[str, str]:
    """Whether quality is first lost near the noise scale: shown only by arms that could have lost it elsewhere."""
    low, high = middle / NEAR, middle * NEAR
    order = f"from {low:.3g} to {high:.3g}, within {NEAR} times the middle of these"
    if bend is None and arms[-1] <= high:
        return f"{told} No arm was large enough to lose quality: the largest lies below {high:.3g}.", "cannot tell"
    if bend is None:
        return f"{told} Quality would be lost {order}; {arms[-1]} lies beyond, and lost none.", "not shown"
    times = f"{told} {bend} is {bend / middle:.2g} times the middle of these, {middle:.3g}"
    if not low <= bend <= high:
        return f"{times}.", "not shown"
    if all(low <= arm <= high for arm in arms[1:]):
        return f"{times}, but so is every arm that could lose quality, {order}.", "cannot tell"
    return f"{times}.", "holds"


def _half_life(scaling: Metrics) -> Claim:
    verdict, remark = _half_life_verdict(scaling)
    return Claim(
        paper="Marek et al. 2025, arXiv 2507.07101",
        says="With AdamW's second moment kept at its half-life in samples, beta2' = beta2^(B'/B), small batches train "
        "as well as large ones.",
        here=f"{sentences.half_life(scaling)}{remark}",
        verdict=verdict,
        figure="half_life.png",
    )


def _half_life_verdict(scaling: Metrics) -> tuple[str, str]:
    """As good as the large batch at its best, and better than with beta2 fixed; the second alone is a part of it."""
    if scaling["half_life/base_failed_runs"]:
        return "cannot tell", ""
    twice = Interval.of(scaling, "half_life/twice_lr_loss_above")
    if twice is not None and twice.high < 0:
        base = scaling["half_life/base_effective_batch"]
        return "cannot tell", (
            f" But at twice its learning rate {base} ends with a loss {sentences.compared(twice, 'this')}, so that it "
            "was not at its best: raise scaling.half_life.base_lr."
        )
    if scaling["half_life/kept_failed_runs"] or not scaling["half_life/fixed_is_worse"]:
        return "not shown", ""
    return "in part" if scaling["half_life/kept_is_worse"] else "holds", ""


def _arms(efficiency: Curve, scaling: Curve) -> Iterator[str]:
    for trial, rule in sentences.RULE.items():
        lines = {name: points for name, points in scaling.series().items() if name.startswith(f"{trial}/")}
        every = [point for points in lines.values() for point in points]
        bases = [point for point in every if point["effective_batch"] == point["departs_from"]]
        base = f"the base, {bases[0]['effective_batch']}"
        columns = {f"minus that of {base}": "loss_above_base", f"minus that of {rule} there": "loss_above_rule"}
        yield from _table(trial, {"base": bases[:1]} | lines, columns, skip=bases)
    yield from _table(
        "efficiency", efficiency.series(), {"minus that of the smallest arm": "loss_above_reference"}, skip=()
    )


def _table(title: str, lines: Mapping[str, Sequence[Point]], columns: Mapping[str, str], *, skip: Any) -> Iterator[str]:
    heads = ["arm", "effective batch", "learning rate", "beta2", "loss", *columns, "seeds failed"]
    yield f"### {title}"
    yield ""
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for name, points in lines.items():
        for point in points:
            if name == "base" or point not in skip:
                yield _row(name.rpartition("/")[2], point, columns.values())
    yield ""


def _row(arm: str, point: Point, differences: Iterable[str]) -> str:
    cells = [arm, point["effective_batch"], f"{point['lr']:.3g}"]
    cells += ["-" if point["beta2"] is None else f"{point['beta2']:.4g}", shown(point, "validation_loss", ".3g")]
    cells += [shown(point, name, "+.2g") for name in differences]
    return f"| {' | '.join(map(str, cells))} | {point['failed_runs']} of {point['seeds']} |"

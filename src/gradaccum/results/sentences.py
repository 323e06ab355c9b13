"""What training at other effective batches showed, in words: the same ones in the terminal, the recipe and the claims.

Each sentence is made from a stage's `metrics.json` alone, and says of a difference only what its interval shows.
"""

from __future__ import annotations

import math
from itertools import combinations
from statistics import median

from gradaccum.results.intervals import Interval
from gradaccum.results.outcome import Metrics

QUARTERS = tuple(f"noise_scale/quarter_{number}" for number in (1, 2, 3, 4))
"""The noise scale drifts along training, so it is told for each quarter. Where some quarter has one, null is infinite:
no gradient stands out of the noise."""

RULE = {"linear": "warm_up", "half_life": "half_life"}
"""Of each published rule's trial, the name of the arms that do as the paper says."""

UNTUNED = (
    "That is so at the learning rates set here: tuned at each batch, a larger one may keep its quality "
    "(Shallue et al. 2019, arXiv 1811.03600)."
)

SQRT = "In both, the learning rate follows the square root of the batch: this trial's choice, beside the paper's rule."

HARDLY = 0.01
"""The share by which a loss must have fallen for a run to tell anything."""


def compared(difference: Interval, other: str) -> str:
    """Where something lies that differs from `other` by so much, with 95 % confidence."""
    if difference.low > 0:
        return f"{difference.mean:.3g} ({difference.low:.2g} to {difference.high:.2g}) above {other}"
    if difference.high < 0:
        return f"{-difference.mean:.3g} ({-difference.high:.2g} to {-difference.low:.2g}) below {other}"
    return f"not told apart from {other} ({difference.low:+.2g} to {difference.high:+.2g})"


def missed(difference: Interval, loss: float) -> str:
    """How much more loss there may be where none was shown; where that is as much again, that nothing was shown."""
    if not difference.low <= 0 < difference.high:
        return ""
    share = difference.high / abs(loss)
    if share > 1:
        return f", but it may be {1 + share:.2g} times as large: so few seeds cannot tell"
    return f", so up to {share:.0%} more is possible"


def nothing_to_compare(metrics: Metrics) -> str | None:
    """Why the arms say nothing about effective batches; None where they do."""
    loss, before = metrics["reference_validation_loss"], metrics["validation_loss_before"]
    if loss is None:
        return (
            "Every arm failed with some seed: diverged, or ended worse than it began. Lower efficiency.base_lr, unless "
            "the held-out loss cannot fall at all, as with random labels."
        )
    if before - loss < HARDLY * abs(before):
        return (
            f"Training hardly moved, in the smallest arm from validation loss {before:.4g} to {loss:.4g}, so there is "
            "nothing to compare yet. Raise efficiency.samples or efficiency.base_lr."
        )
    return None


def quality(metrics: Metrics) -> str:
    """Up to where a larger batch costs no quality, and how sure that is."""
    good, bad, seeds = (
        metrics["worth_it_up_to_effective_batch"],
        metrics["worse_from_effective_batch"],
        metrics["seeds"],
    )
    reference = f"that at {metrics['reference_effective_batch']}"
    at_good = Interval.of(metrics, "worth_it_loss_above_reference")
    first = f"Up to effective batch {good} a larger batch costs no quality that {seeds} seeds could show"
    if at_good is not None:
        first += (
            f": the loss there is {compared(at_good, reference)}{missed(at_good, metrics['reference_validation_loss'])}"
        )
    elif good == metrics["reference_effective_batch"]:
        first += ": it is the smallest arm"
    if bad is None:
        return f"{first}. It is the largest measured, so larger ones may be worth it too."
    return f"{first}. {_lost(metrics, reference)} {UNTUNED}"


def _lost(metrics: Metrics, reference: str) -> str:
    bad, failed = metrics["worse_from_effective_batch"], metrics["worse_from_failed_runs"]
    if failed:
        return f"At {bad}, {failed} of {metrics['seeds']} seeds failed."
    above = Interval.of(metrics, "worse_from_loss_above_reference")
    assert above is not None, "an arm in which no seed failed has a loss"
    return f"At {bad} the loss is {compared(above, reference)}."


def noise_scale(metrics: Metrics) -> str | None:
    """The noise scale by quarter of training, and whether it drifts; None where there is none."""
    if middle(metrics) is None:
        return None
    shown = ", ".join(_quarter(*quarter) for quarter in _quarters(metrics))
    drift = "it drifts" if drifts(metrics) else "no drift that these intervals show"
    return (
        f"The gradient noise scale at effective batch {metrics['noise_scale_effective_batch']} is, by quarter of "
        f"training, {shown} targets: {drift}."
    )


def drifts(metrics: Metrics) -> bool:
    """Whether two quarters' intervals do not meet."""
    ends = [(low, high) for _, low, high in _quarters(metrics)]
    return any(one[1] < other[0] or other[1] < one[0] for one, other in combinations(ends, 2))


def middle(metrics: Metrics) -> float | None:
    """The median of the quarters; None where none has a noise scale."""
    if all(metrics[f"{name}_low"] is None for name in QUARTERS):
        return None
    return median(scale for scale, _, _ in _quarters(metrics))


def _quarters(metrics: Metrics) -> list[tuple[float, ...]]:
    """Scale, low and high of each."""
    ends = ("", "_low", "_high")
    values = [[metrics[f"{name}{end}"] for end in ends] for name in QUARTERS]
    return [tuple(math.inf if value is None else float(value) for value in quarter) for quarter in values]


def _quarter(scale: float, low: float, high: float) -> str:
    if math.isinf(low):
        return "no gradient stands out of the noise"
    shown = "unbounded" if math.isinf(scale) else f"{scale:.3g}"
    return f"{shown} ({low:.3g} to {'no bound' if math.isinf(high) else f'{high:.3g}'})"


def linear_scaling(metrics: Metrics) -> str:
    """What a larger batch ends with at SGD's learning rate scaled, with a warm-up and without, and unscaled."""
    base = metrics["linear/base_effective_batch"]
    if metrics["linear/base_failed_runs"]:
        return _no_base(metrics, "linear", "linear scaling")
    return (
        f"Linear scaling from effective batch {base} to {metrics['linear/times']:g} times that: with warm-up it "
        f"{_ending(metrics, 'linear/warm_up', f'that at {base}')}; without warm-up it "
        f"{_ending(metrics, 'linear/no_warm_up', 'that with warm-up')}; with the learning rate unscaled it "
        f"{_ending(metrics, 'linear/unscaled', 'that with warm-up')}."
    )


def half_life(metrics: Metrics) -> str:
    """What AdamW's second moment does to the smallest arm, with its half-life kept and with its beta fixed."""
    base = metrics["half_life/base_effective_batch"]
    if metrics["half_life/base_failed_runs"]:
        return _no_base(metrics, "half_life", "the half-life rule")
    return (
        f"At effective batch {metrics['half_life/effective_batch']}, AdamW with its second moment's half-life kept "
        f"{_ending(metrics, 'half_life/kept', f'that at {base}')}; with beta2 fixed it "
        f"{_ending(metrics, 'half_life/fixed', 'that with the half-life kept')}. {SQRT}"
    )


def _no_base(metrics: Metrics, trial: str, rule: str) -> str:
    return (
        f"Effective batch {metrics[f'{trial}/base_effective_batch']}, from which {rule} departs, failed with "
        f"{metrics[f'{trial}/base_failed_runs']} of {metrics['seeds']} seeds: lower scaling.{trial}.base_lr."
    )


def _ending(metrics: Metrics, arm: str, other: str) -> str:
    """How an arm ended beside the one it is judged by, and what loss that may have missed."""
    if metrics[f"{arm}_failed_runs"]:
        return f"failed with {metrics[f'{arm}_failed_runs']} of {metrics['seeds']} seeds"
    difference = Interval.of(metrics, f"{arm}_loss_above")
    if difference is None:
        return "failed with no seed"
    of = metrics[f"{arm.partition('/')[0]}/base_validation_loss"]
    return f"ends with a loss {compared(difference, other)}{missed(difference, of)}"

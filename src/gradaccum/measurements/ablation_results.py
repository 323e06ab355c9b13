"""What the ablation's arms show: metrics, curve, tables, findings and broken claims."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradaccum.measurements.ablation import Config
from gradaccum.measurements.mistakes import CONTROL, Shown, VariantArm, VariantTrainer, ragged_cut
from gradaccum.results.curve import Curve
from gradaccum.results.outcome import Outcome, StepSeries

EXACT = 1e-9
"""Bound on relative differences that are zero but for float64's rounding."""

NOTICED = 0.01
"""Relative difference of the last loss from which a mistake would be noticed."""


def outcome_of(shown: Sequence[Shown], trainer: VariantTrainer) -> Outcome:
    config = trainer.config
    exact = [each.arm for each in shown if each.arm.name == CONTROL and trainer.counts_are_equal(each.arm)]
    gaps = {arm.accum_steps: trainer.control_gap(arm) for arm in exact}
    points = tuple(point(each, config) for each in shown)
    return Outcome(
        metrics=headline(shown, config) | {f"sgd/{CONTROL}/gap_to_naive": gaps[max(gaps)] for _ in gaps},
        curve=Curve("ablation", "accum_steps", points),
        summary=[row(each) for each in shown if each.arm.accum_steps == max(config.accum_steps)],
        findings=list(findings(shown, gaps)),
        failures=[*failures(shown, trainer), *control_failures(gaps)],
        tables={"losses": list(loss_table(shown))},
        series=[loss_series(each, config.num_steps) for each in shown],
    )


def headline(shown: Sequence[Shown], config: Config) -> dict[str, Any]:
    """At the largest number of accumulation steps."""
    metrics: dict[str, Any] = {}
    for each in shown:
        if each.arm.accum_steps == max(config.accum_steps):
            metrics[f"{each.arm.series}/grad_norm_ratio"] = each.grad_norm_ratio
            metrics[f"{each.arm.series}/param_diff_step1"] = each.param_diff_step1
            metrics[f"{each.arm.series}/final_loss"] = None if each.diverged_at_step else each.losses[-1]
            metrics[f"{each.arm.series}/diverged_at_step"] = each.diverged_at_step
    return metrics


def point(each: Shown, config: Config) -> dict[str, Any]:
    cut = ragged_cut(config.effective_batch, each.arm.accum_steps) if each.arm.variant.ragged else None
    return {
        "series": each.arm.series,
        "effective_batch": config.effective_batch,
        "accum_steps": each.arm.accum_steps,
        "micro_batch": None if cut else config.effective_batch // each.arm.accum_steps,
        "world_size": 1,
        "cut": cut,
        "right_loop": right_loop(each.arm).series if each.arm.name in RIGHT_LOOP else None,
        "grad_norm_ratio": each.grad_norm_ratio,
        "param_diff_step1": each.param_diff_step1,
        "final_loss": None if each.diverged_at_step else each.losses[-1],
        "diverged_at_step": each.diverged_at_step,
    }


def row(each: Shown) -> dict[str, Any]:
    diverged = each.diverged_at_step
    return {
        "variant": each.arm.series,
        "N": each.arm.accum_steps,
        "grad norm ratio": each.grad_norm_ratio,
        "param diff at step 1": each.param_diff_step1,
        "final loss": f"diverged at step {diverged}" if diverged else each.losses[-1],
    }


def loss_series(each: Shown, num_steps: int) -> StepSeries:
    values = [*each.losses, *[None] * (num_steps - len(each.losses))]
    return StepSeries(f"{each.arm.series}/loss/n{each.arm.accum_steps}", range(1, num_steps + 1), values)


def loss_table(shown: Sequence[Shown]) -> Iterator[dict[str, Any]]:
    for each in shown:
        for step, loss in enumerate(each.losses, start=1):
            yield {"series": each.arm.series, "accum_steps": each.arm.accum_steps, "step": step, "loss": loss}


def findings(shown: Sequence[Shown], gaps: Mapping[int, float]) -> Iterator[str]:
    by_arm = {each.arm: each for each in shown}
    most = max(each.arm.accum_steps for each in shown)
    naive = [each for each in shown if each.arm.name == "naive" and each.arm.optimizer == shown[0].arm.optimizer]
    if naive:
        times = ", ".join(f"{each.grad_norm_ratio:.9g} at N={each.arm.accum_steps}" for each in naive)
        yield f"The naive gradient over the right one: {times}."
    for optimizer in dict.fromkeys(each.arm.optimizer for each in shown):
        for right, wrong in (("scaled", "naive"), ("scaled_clipped", "naive_clipped")):
            pair = [by_arm.get(VariantArm(optimizer, name, most)) for name in (right, wrong)]
            if pair[0] and pair[1]:
                yield f"At N={most}, {told(pair[1], pair[0])}."
    lower = list(lower_than_right(by_arm, most))
    if lower:
        yield (
            f"At N={most}, {', '.join(lower)} end below the right loop. A lower loss is no merit of the mistake: it "
            "takes larger steps, or more of them, and the right loop at a larger learning rate does that too."
        )
    if gaps:
        yield (
            f"Control: naive SGD is the engine at N times the learning rate: after step 1 their parameters differ by "
            f"at most {max(gaps.values()):.1g} of their norm."
        )


RIGHT_LOOP = {
    "naive": "scaled",
    "mean_of_means": "scaled_ragged",
    "step_every_micro": "scaled",
    "naive_clipped": "scaled_clipped",
    "clip_every_micro": "scaled_clipped",
}
"""What each mistake was meant to be: on the same cut, and clipped if it clips."""


def right_loop(wrong: VariantArm) -> VariantArm:
    return VariantArm(wrong.optimizer, RIGHT_LOOP[wrong.name], wrong.accum_steps)


def lower_than_right(by_arm: Mapping[VariantArm, Shown], accum_steps: int) -> Iterator[str]:
    """Mistakes whose last loss is noticeably below that of the loop that they were meant to be."""
    for arm, wrong in by_arm.items():
        right = by_arm.get(right_loop(arm)) if arm.name in RIGHT_LOOP else None
        if arm.accum_steps != accum_steps or right is None or wrong.diverged_at_step or right.diverged_at_step:
            continue
        if wrong.losses[-1] < right.losses[-1] * (1 - NOTICED):
            yield arm.series


HIDES_BECAUSE = {
    ("sgd", "naive"): "at so small a learning rate SGD survives steps N times as long",
    ("adamw", "naive"): "AdamW's update does not depend on the gradient's scale",
    ("sgd", "naive_clipped"): "right or wrong, every gradient is cut to clip_norm",
    ("adamw", "naive_clipped"): "right or wrong, every gradient is cut to clip_norm",
}


def told(wrong: Shown, right: Shown) -> str:
    """How a mistake and the right loop end, and whether anybody would notice."""
    ends = f"{wrong.arm.series} {ending(wrong)}, {right.arm.name} {ending(right)}"
    hides = not wrong.diverged_at_step and math.isclose(wrong.losses[-1], right.losses[-1], rel_tol=NOTICED)
    return f"{ends}: the mistake hides ({HIDES_BECAUSE[wrong.arm.optimizer, wrong.arm.name]})" if hides else f"{ends}"


def ending(each: Shown) -> str:
    return (
        f"diverges at step {each.diverged_at_step}" if each.diverged_at_step else f"ends at loss {each.losses[-1]:.4g}"
    )


def failures(shown: Sequence[Shown], trainer: VariantTrainer) -> Iterator[str]:
    """Claims about ratios, where a variant's cut lets them be exact."""
    for each in shown:
        expected = {"scaled": 1, "scaled_ragged": 1, "naive": each.arm.accum_steps}.get(each.arm.name)
        if expected is None or each.grad_norm_ratio is None:
            continue
        if each.arm.name == "naive" and not trainer.counts_are_equal(each.arm):
            continue
        if not math.isclose(each.grad_norm_ratio, expected, rel_tol=EXACT):
            yield (
                f"{each.arm.series} at N={each.arm.accum_steps}: the gradient's norm is {each.grad_norm_ratio:.12g} "
                f"times the full batch's, expected {expected}."
            )


def control_failures(gaps: Mapping[int, float]) -> Iterator[str]:
    for steps, gap in gaps.items():
        if not gap < EXACT:
            yield f"naive SGD at N={steps} differs from the engine at {steps} times the learning rate by {gap:.1e}."

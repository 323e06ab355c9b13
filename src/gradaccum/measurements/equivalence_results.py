"""What the equivalence's comparison shows: metrics, curve, table, findings and broken claims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradaccum.measurements.cuts import Compared, ComparedCuts, Pair, cut_name
from gradaccum.measurements.equivalence import Config
from gradaccum.results.curve import Curve
from gradaccum.results.outcome import Outcome


def outcome_of(comparison: ComparedCuts, config: Config) -> Outcome:
    compared, controls, narrow = comparison.compared, comparison.controls, comparison.narrow
    metrics = headline(compared, controls, comparison.pairs)
    return Outcome(
        metrics={**metrics, **{name: value for each in narrow for name, value in each.metrics().items()}},
        curve=Curve("equivalence", "accum_steps", tuple(points(compared, controls, config))),
        summary=[
            *(row(each, each.optimizer) for each in compared),
            *(row(each, f"control: {name}") for name, each in controls.items()),
        ],
        findings=[
            *findings(compared, controls, comparison.pairs),
            *(f"{cause.kind}: {cause.finding} {cause.advice}" for cause in comparison.causes),
            *(each.finding() for each in narrow),
        ],
        failures=[*failures(compared, controls), *(failure for each in narrow for failure in each.failures())],
    )


def headline(compared: Sequence[Compared], controls: Mapping[str, Compared], pairs: Sequence[Pair]) -> dict[str, Any]:
    return {
        "max_grad_diff": max(each.single.max_grad_diff for each in compared),
        "max_param_diff": max(each.single.max_param_diff for each in compared),
        "max_grad_rel_diff_float64": max(each.sharp.grad_rel_diff for each in compared),
        "max_pair_grad_diff": max((pair.difference.max_grad_diff for pair in pairs), default=0.0),
        "optimizer_steps_per_window": max(each.trace.optimizer_steps for each in compared),
        "kinks": sum(each.verdict.kink for each in compared),
        "undivided_rejected": not controls["undivided"].verdict.equivalent,
        "mean_of_means_rejected": not controls["mean_of_means"].verdict.equivalent,
        "equivalent": not list(failures(compared, controls)),
    }


def points(compared: Sequence[Compared], controls: Mapping[str, Compared], config: Config) -> Iterator[dict[str, Any]]:
    for each in compared:
        yield point(each, each.optimizer if len(set(each.cut)) == 1 else f"{each.optimizer}/uneven", config)
    for name, control in controls.items():
        yield point(control, f"control/{name}", config)


def point(each: Compared, series: str, config: Config) -> dict[str, Any]:
    even = len(set(each.cut)) == 1
    return {
        "series": series,
        "effective_batch": config.effective_batch,
        "accum_steps": len(each.cut),
        "micro_batch": each.cut[0] if even else None,
        "world_size": 1,
        "cut": None if even else list(each.cut),
        "max_grad_diff": each.single.max_grad_diff,
        "max_param_diff": each.single.max_param_diff,
        "max_state_diff": each.single.max_state_diff,
        "loss_diff": each.single.loss_diff,
        "grad_rel_diff": each.single.grad_rel_diff,
        "param_rel_diff": each.single.param_rel_diff,
        "grad_rel_diff_float64": each.sharp.grad_rel_diff,
        "param_rel_diff_float64": each.sharp.param_rel_diff,
        "loss_rel_diff_float64": each.sharp.loss_rel_diff,
        "state_rel_diff_float64": each.sharp.state_rel_diff,
        "grad_norm_ratio": each.single.norm_ratio,
        "full_to_truth": each.full_to_truth,
        "cut_to_truth": each.cut_to_truth,
        "optimizer_steps": each.trace.optimizer_steps,
        "kink": each.verdict.kink,
        "equivalent": each.verdict.equivalent,
    }


def row(each: Compared, name: str) -> dict[str, Any]:
    return {
        "optimizer": name,
        "micro x N": cut_name(each.cut),
        "max grad diff": each.single.max_grad_diff,
        "max param diff": each.single.max_param_diff,
        "float64 grad rel": each.sharp.grad_rel_diff,
        "float64 state rel": each.sharp.state_rel_diff,
        "steps": each.trace.optimizer_steps,
        "verdict": "equivalent" if each.verdict.equivalent else "rejected",
    }


def findings(compared: Sequence[Compared], controls: Mapping[str, Compared], pairs: Sequence[Pair]) -> Iterator[str]:
    if all(each.verdict.equivalent for each in compared):
        yield agreement(compared)
    if pairs:
        worst = max(pairs, key=lambda pair: pair.difference.max_grad_diff)
        yield f"Largest gradient difference between any two cuts: {worst.difference.max_grad_diff:.1e} ({worst.name})."
    for each in compared:
        if each.verdict.kink:
            yield (
                f"{each.name}: a kink. float64 agrees; in float32 one unit flipped. Distance to the float64 gradient: "
                f"full batch {each.full_to_truth:.1e}, this cut {each.cut_to_truth:.1e}."
            )
    for name, control in controls.items():
        if not control.verdict.equivalent:
            yield f"Control {name} ({control.name}) is rejected, as it must be: {control.verdict.problems[0]}."


def agreement(compared: Sequence[Compared]) -> str:
    optimizers = " and ".join(dict.fromkeys(each.optimizer for each in compared))
    return (
        f"All {len(compared)} cuts under {optimizers} are the full batch's step: gradients differ by at most "
        f"{max(each.single.max_grad_diff for each in compared):.1e} in float32, and in float64 by "
        f"{max(each.sharp.grad_rel_diff for each in compared):.1e} of their magnitude; the optimizer steps once a "
        f"window, and its state differs by {max(each.sharp.state_rel_diff for each in compared):.1e} of its magnitude."
    )


def failures(compared: Sequence[Compared], controls: Mapping[str, Compared]) -> Iterator[str]:
    for each in compared:
        for problem in each.verdict.problems:
            yield f"{each.name}: {problem}."
        if each.trace.optimizer_steps != 1:
            yield f"{each.name}: the optimizer stepped {each.trace.optimizer_steps} times in one window, not once."
    for name, control in controls.items():
        if control.verdict.equivalent:
            yield f"The comparison is blind: the control {name} ({control.name}), a known mistake, passed."

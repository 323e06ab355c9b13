"""When are two ways to take an optimizer step the same computation, up to rounding?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gradaccum.measurements.comparison import Scale, Trace, difference, largest, norm

SHARP = 1e-12
"""Bound in float64. Right implementations differ by under 1e-14, every known wrong one by over 1e-5."""

UPDATE = 1e-6
"""Bound in float64 on what a step adds to the parameters: Adam divides rounding by its epsilon."""

AMPLIFIED = 100
"""An update is small beside the magnitudes that round in it, where gradients cancel."""

VISIBLE_UPDATE = 1e-9
"""Of the parameters' norm in float64: below it, rounding of the parameters hides a step's size to `UPDATE`."""

FLOAT32_ROUNDING = 2.0**-24

A_KINK_AT_MOST = 1e-2
"""One flipped unit is a small part of the gradient; a difference above this share of it is no kink."""


def float32_bound(micro_batches: int) -> float:
    """Largest right difference in float32, relative to the summed magnitudes.

    A floor for another order of reduction, from two micro-batches on, and slow growth with their number.
    """
    return FLOAT32_ROUNDING * (32 + 2 * math.sqrt(micro_batches))


@dataclass(frozen=True)
class Difference:
    """How far one trace lies from another.

    Attributes:
        max_grad_diff, max_param_diff, max_state_diff, loss_diff: largest absolute differences.
        worst_parameter: whose gradient differs most.
        grad_rel_diff, loss_rel_diff, state_rel_diff: L2 differences over the summed magnitudes.
        param_rel_diff: L2 difference over the L2 norm.
        update_rel_diff: the same difference over what the reference's step added, as far as that exceeds rounding.
        norm_ratio: gradient norm over the reference's.
        steps_differ: the optimizer's own step counters differ.
    """

    max_grad_diff: float
    max_param_diff: float
    max_state_diff: float
    loss_diff: float
    worst_parameter: str
    grad_rel_diff: float
    loss_rel_diff: float
    state_rel_diff: float
    param_rel_diff: float
    update_rel_diff: float
    norm_ratio: float
    steps_differ: bool

    @classmethod
    def between(cls, trace: Trace, reference: Trace, scale: Scale) -> Difference:
        gradients = difference(trace.gradients, reference.gradients)
        parameters = difference(trace.parameters, reference.parameters)
        worst, max_grad_diff = largest(gradients)
        states = {
            kind: difference(trace.state.get(kind, {}), reference.state.get(kind, {}))
            for kind in {*trace.state, *reference.state} - {"step"}
        }
        return cls(
            max_grad_diff=max_grad_diff,
            max_param_diff=largest(parameters)[1],
            max_state_diff=max((largest(state)[1] for state in states.values()), default=0.0),
            loss_diff=abs(trace.loss - reference.loss),
            worst_parameter=worst,
            grad_rel_diff=ratio(norm(gradients), scale.gradient),
            loss_rel_diff=ratio(abs(trace.loss - reference.loss), scale.loss),
            state_rel_diff=max((ratio(norm(state), scale.state[kind]) for kind, state in states.items()), default=0.0),
            param_rel_diff=ratio(norm(parameters), norm(reference.parameters)),
            update_rel_diff=ratio(
                norm(parameters), norm(reference.update) + VISIBLE_UPDATE * norm(reference.parameters)
            ),
            norm_ratio=ratio(trace.grad_norm, reference.grad_norm),
            steps_differ=largest(difference(trace.state.get("step", {}), reference.state.get("step", {})))[1] > 0,
        )


@dataclass(frozen=True)
class Verdict:
    """What one cut's differences in float64 and float32 say together.

    Attributes:
        problems: each a sentence; empty when the cut is equivalent.
        kink: only float32 exceeds its bound, by so little that one unit flipped between two right computations.
        only_in_float32: float64 agrees, and float32 exceeds its bound.
        only_the_loss: nothing else is wrong.
    """

    problems: tuple[str, ...]
    kink: bool
    only_in_float32: bool = False
    only_the_loss: bool = False

    @property
    def equivalent(self) -> bool:
        return not self.problems


def judge(
    sharp: Difference, single: Difference, *, micro_batches: int, tolerance: float, narrowed: bool = False
) -> Verdict:
    """Judge a cut by its differences from the full batch in float64 (`sharp`) and float32 (`single`).

    Args:
        sharp, single: the differences.
        micro_batches: how many the cut has.
        tolerance: largest absolute difference in float32.
        narrowed: part of `sharp` was computed in float32.
    """
    bound = float32_bound(micro_batches) if narrowed else SHARP
    sharply = [*_sharp_problems(sharp, bound)]
    told = [*_loss_problem(sharp, bound)]
    singly = [*_single_problems(single, micro_batches, tolerance)]
    kink = bool(singly) and not sharply and not told and single.grad_rel_diff < A_KINK_AT_MOST
    problems = [*sharply, *told, *([] if kink else singly)]
    return Verdict(tuple(problems), kink, bool(singly) and not sharply, bool(told) and problems == told)


def _sharp_problems(sharp: Difference, bound: float) -> Iterator[str]:
    for what, value, more in (
        (f"the gradient of {sharp.worst_parameter}", sharp.grad_rel_diff, f" (ratio of norms {sharp.norm_ratio:.4g})"),
        ("the optimizer's state", sharp.state_rel_diff, ""),
    ):
        if not value < bound:
            yield f"in float64 {what} differs by {value:.1e} of its magnitude, allowed is {bound:.0e}{more}"
    if not sharp.update_rel_diff < max(UPDATE, AMPLIFIED * bound):
        yield f"in float64 what is added to the parameters differs by {sharp.update_rel_diff:.1e} of its size"
    if sharp.steps_differ:
        yield "the optimizer's step counter differs, so it stepped more or less often than once"


def _loss_problem(sharp: Difference, bound: float) -> Iterator[str]:
    if not sharp.loss_rel_diff < bound:
        yield f"in float64 the loss differs by {sharp.loss_rel_diff:.1e} of its magnitude, allowed is {bound:.0e}"


def _single_problems(single: Difference, micro_batches: int, tolerance: float) -> Iterator[str]:
    bound = float32_bound(micro_batches)
    if not single.grad_rel_diff <= bound:
        yield f"in float32 the gradient differs by {single.grad_rel_diff:.1e} of its magnitude, allowed is {bound:.1e}"
    for what, value in (
        (f"the gradient of {single.worst_parameter}", single.max_grad_diff),
        ("a parameter after the step", single.max_param_diff),
    ):
        if not value < tolerance:
            yield f"in float32 {what} differs by {value:.1e}, allowed is the tolerance {tolerance:.0e}"


def ratio(part: float, whole: float) -> float:
    """`part / whole`; 0 where both are, infinite where only the whole is."""
    if whole:
        return part / whole
    return math.inf if part else 0.0

"""When are two ways to take an optimizer step the same computation, up to rounding?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gradaccum.measurements.comparison import Scale, Trace, difference, largest, norm

SHARP = 1e-12
"""Bound in float64. Right implementations differ by under 1e-14, every known wrong one by over 1e-5."""

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
            norm_ratio=ratio(trace.grad_norm, reference.grad_norm),
            steps_differ=largest(difference(trace.state.get("step", {}), reference.state.get("step", {})))[1] > 0,
        )


@dataclass(frozen=True)
class Verdict:
    """What one cut's differences in float64 and float32 say together.

    Attributes:
        problems: each a sentence; empty when the cut is equivalent.
        kink: only float32 exceeds its bound, by so little that one unit flipped between two right computations.
    """

    problems: tuple[str, ...]
    kink: bool

    @property
    def equivalent(self) -> bool:
        return not self.problems


def judge(sharp: Difference, single: Difference, *, micro_batches: int, tolerance: float) -> Verdict:
    """Judge a cut by its differences from the full batch in float64 (`sharp`) and float32 (`single`)."""
    sharply = [*_sharp_problems(sharp, micro_batches)]
    singly = [*_single_problems(single, micro_batches, tolerance)]
    kink = bool(singly) and not sharply and single.grad_rel_diff < A_KINK_AT_MOST
    return Verdict(tuple(sharply if kink else sharply + singly), kink)


def _sharp_problems(sharp: Difference, micro_batches: int) -> Iterator[str]:
    for what, value in (
        (f"the gradient of {sharp.worst_parameter}", sharp.grad_rel_diff),
        ("the loss", sharp.loss_rel_diff),
        ("the optimizer's state", sharp.state_rel_diff),
    ):
        if not value < SHARP:
            hint = f" ({cause(sharp.norm_ratio, micro_batches)})" if what.startswith("the gradient") else ""
            yield f"in float64 {what} differs by {value:.1e} of its magnitude, allowed is {SHARP:.0e}{hint}"
    if sharp.steps_differ:
        yield "the optimizer's step counter differs, so it stepped more or less often than once"


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


def cause(norm_ratio: float, micro_batches: int) -> str:
    """What the ratio of gradient norms tells of a mistake."""
    if math.isclose(norm_ratio, micro_batches, rel_tol=1e-3) and micro_batches > 1:
        return f"ratio of norms {norm_ratio:.2f} = accumulation steps: the loss is not divided"
    if math.isclose(norm_ratio, 1 / micro_batches, rel_tol=1e-3) and micro_batches > 1:
        return f"ratio of norms {norm_ratio:.3g} = 1 / accumulation steps: the loss is divided twice"
    return f"ratio of norms {norm_ratio:.4g}"


def ratio(part: float, whole: float) -> float:
    """`part / whole`; 0 where both are, infinite where only the whole is."""
    if whole:
        return part / whole
    return math.inf if part else 0.0

"""A loop's step beside the full batch's; and of what only float32 shows, whose rounding it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradaccum.engine.batching import Batch
from gradaccum.measurements.comparison import Trace, full_batch_step, scale_of
from gradaccum.measurements.subject import Step, Subject
from gradaccum.measurements.variants import scaled
from gradaccum.measurements.verdict import Difference, Verdict, float32_bound
from gradaccum.measurements.watching import SETTINGS, watch

OTHER_SEEDS = (1, 2)
"""A kink is particular to the parameters; what shows at these too is none."""

AS_MUCH = 4
"""So many times as much as a right step rounds in the same precision may a cut differ."""


@dataclass(frozen=True)
class Compared:
    """A loop's step beside the full batch's."""

    trace: Trace
    reference: Trace
    difference: Difference


def compare(
    subject: Subject, trace: Trace, cut: Sequence[int], *, clip_norm: float | None, rate: float = SETTINGS.lr
) -> Compared:
    """A trace beside the full batch's step with the same clip, in the trace's own precision."""
    dtype, settings = trace.dtype, replace(SETTINGS, clip_norm=clip_norm)
    reference = subject.trace(full_batch_step(subject.objective, clip_norm), [sum(cut)], dtype, rate=rate)
    scale = scale_of(subject.bench(), subject.window(cut, dtype), settings=settings, dtype=dtype)
    return Compared(trace, reference, Difference.between(trace, reference, scale))


def rejudged(
    subject: Subject, cut: tuple[int, ...], verdict: Verdict, *, single: Difference, clip_norm: float | None
) -> tuple[Verdict, str]:
    """The verdict once more, and the precision that is to blame, if one is.

    What only float32 shows is a lower precision that loop or model ask for, a kink, or the loop's own doing.
    """
    difference, bound = single.grad_rel_diff, float32_bound(len(cut))
    if not verdict.only_in_float32 or difference <= bound:
        return verdict, ""
    autocast = watch(subject, [subject.window(cut, torch.float32)], dtype=torch.float32)[0].autocast
    if autocast and difference <= AS_MUCH * _error(
        subject, _whole_in(autocast, subject), [sum(cut)], clip_norm=clip_norm
    ):
        return Verdict((), kink=False), f"{autocast}".removeprefix("torch.")
    others = (replace(subject, seed=subject.seed + more) for more in OTHER_SEEDS)
    if verdict.kink and any(_error(other, other.step, cut, clip_norm=clip_norm) <= bound for other in others):
        return verdict, ""
    plain = partial(scaled, objective=subject.objective, clip_norm=clip_norm)
    if difference <= AS_MUCH * _error(subject, plain, cut, clip_norm=clip_norm):
        return Verdict((), kink=False), "the model's own precision"
    problem = f"in float32 the gradient differs by {difference:.1e} of its magnitude, allowed is {bound:.1e}"
    return Verdict((problem,), kink=False, only_in_float32=True), ""


def _error(subject: Subject, step: Step, cut: Sequence[int], *, clip_norm: float | None) -> float:
    """By how much a step's gradient differs from the full batch's in float32."""
    trace = subject.trace(step, cut, torch.float32)
    return compare(subject, trace, cut, clip_norm=clip_norm).difference.grad_rel_diff


def _whole_in(dtype: torch.dtype, subject: Subject) -> Step:
    """The full batch's step in a lower precision."""

    def step(model: nn.Module, optimizer: Optimizer, window: Sequence[Batch]) -> Tensor:
        with torch.autocast("cpu", dtype):
            loss = subject.objective.share(model, window[0], subject.objective.totals(window))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step

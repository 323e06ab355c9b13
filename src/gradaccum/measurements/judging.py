"""One cut of a batch, as a loop takes it, against the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gradaccum.measurements.clips import Clipping, clipping_of
from gradaccum.measurements.comparison import Trace, norm, same
from gradaccum.measurements.habits import later_windows_differ, runs_in_evaluation_mode, watch_windows
from gradaccum.measurements.lower_precision import MATCH_IN_FLOAT32, Narrowing
from gradaccum.measurements.mistake import Parts, flat_in_order, name_the_mistake, name_the_other_update
from gradaccum.measurements.rounding import Compared, compare, rejudged
from gradaccum.measurements.subject import Subject
from gradaccum.measurements.verdict import Difference, Verdict, float32_bound, judge, ratio
from gradaccum.measurements.watching import SETTINGS

TOLERANCE = 1e-4


@dataclass(frozen=True)
class ParameterDifference:
    """One parameter's gradient in float64: distance to the full batch's over the norm of all, and ratio of norms."""

    name: str
    relative_difference: float
    norm_ratio: float


@dataclass(frozen=True)
class CutDiagnosis:
    """One cut against the full batch.

    Attributes:
        cut: sizes of the micro-batches.
        sharp, single: differences in float64 and in float32.
        optimizer_steps: how often the loop stepped.
        mistake: what the loop does to the gradient of right accumulation, to the parameters, or to the window after
            it; empty where nothing is wrong.
        reported: the loss that the loop returns, and the window's, where only that is wrong.
        clip_norm: what the loop clips the window's gradient to, rightly; None where it does not clip.
        precision: what loop or model compute in, where that is less than float32 and explains the difference.
        match: as close as right numbers come in float64: less close where part of it is computed in float32.
        sums_its_parts: whether the gradient is the sum of the micro-batches' own.
        parameters: every parameter, the worst one first.
    """

    cut: tuple[int, ...]
    sharp: Difference
    single: Difference
    verdict: Verdict
    optimizer_steps: int
    mistake: str
    reported: tuple[float, float] | None
    clip_norm: float | None
    precision: str
    match: float
    sums_its_parts: bool
    parameters: tuple[ParameterDifference, ...]

    @property
    def equivalent(self) -> bool:
        return self.verdict.equivalent and self.optimizer_steps == 1 and not self.mistake

    @property
    def is_a_kink(self) -> bool:
        """Whether one unit flipped in float32; a mere excess over an absolute tolerance is none."""
        return self.verdict.kink and self.single.grad_rel_diff > float32_bound(len(self.cut))

    @property
    def is_narrowed(self) -> bool:
        """Whether part of the float64 run is computed in float32."""
        return self.match == MATCH_IN_FLOAT32


def judge_cut(subject: Subject, cut: tuple[int, ...]) -> CutDiagnosis:
    """Take the loop's step over the cut and the full batch's, in float64 and float32, and say what differs."""
    narrowing = Narrowing()
    traces = [narrowing.during(partial(subject.trace, subject.step, cut, torch.float64))]
    narrowing.during(lambda: subject.gradient(subject.model()))
    traces.append(subject.trace(subject.step, cut, torch.float32))
    subject = replace(subject, match=MATCH_IN_FLOAT32) if narrowing.found else subject
    parts = Parts.of(subject.model(), subject.objective, partial(subject.window, cut, torch.float64))
    clipping = clipping_of(subject, cut, parts.right)
    # a rate that differs from call to call is a schedule that counts them, and no affair of the window's
    scheduled = traces[0].rates != traces[1].rates and all(rate > 0 for trace in traces for rate in trace.rates)
    sharp, single = (
        compare(subject, trace, cut, clip_norm=clipping.norm, rate=trace.rates[0] if scheduled else SETTINGS.lr)
        for trace in traces
    )
    verdict = judge(
        sharp.difference,
        single.difference,
        micro_batches=len(cut),
        tolerance=TOLERANCE,
        narrowed=narrowing.found,
    )
    return Judged(subject, cut, parts, clipping, sharp, single).diagnosis(verdict)


@dataclass(frozen=True)
class Judged:
    """All that was seen of one cut, to be put into words."""

    subject: Subject
    cut: tuple[int, ...]
    parts: Parts
    clipping: Clipping
    sharp: Compared
    single: Compared

    def diagnosis(self, verdict: Verdict) -> CutDiagnosis:
        verdict, precision = rejudged(
            self.subject, self.cut, verdict, single=self.single.difference, clip_norm=self.clipping.norm
        )
        mistake = self.mistake(verdict)
        trace, reference = self.sharp.trace, self.sharp.reference
        return CutDiagnosis(
            cut=self.cut,
            sharp=self.sharp.difference,
            single=self.single.difference,
            verdict=verdict,
            optimizer_steps=trace.optimizer_steps,
            mistake=mistake,
            reported=(trace.loss, reference.loss) if verdict.only_the_loss and not mistake else None,
            clip_norm=self.clipping.norm,
            precision=precision,
            match=self.subject.match,
            sums_its_parts=same(self.found, self.parts.right, self.subject.match),
            parameters=tuple(_by_parameter(trace, reference)),
        )

    @property
    def found(self) -> Tensor:
        return flat_in_order(self.subject.model(), self.sharp.trace.gradients)

    def mistake(self, verdict: Verdict) -> str:
        """What the loop does wrong, in words; empty where it is right, or only model and objective are to blame."""
        steps, rate = self.sharp.trace.optimizer_steps, self.sharp.reference.rates[0]
        if steps != 1:
            return f"the optimizer that the loop was given stepped {steps} times in one window, not once"
        return (
            self.clipping.mistake
            or self.wrong_gradient()
            or name_the_other_update(self.sharp.trace, self.found, given=SETTINGS.lr, expected=rate)
            or (f"{verdict.problems[0]}{ROUNDS}" if verdict.only_in_float32 and verdict.problems else "")
            or self.wrong_later(right_once=verdict.equivalent or verdict.only_the_loss)
        )

    def wrong_gradient(self) -> str:
        if self.clipping.norm is not None:
            return ""
        if self.clipping.unclipped is None:
            return name_the_mistake(self.found, self.parts, match=self.subject.match)
        named = name_the_mistake(self.clipping.unclipped, self.parts, match=self.subject.match)
        return named and f"{named}, before it is clipped"

    def wrong_later(self, *, right_once: bool) -> str:
        seen = watch_windows(self.subject, self.cut)
        if right_once and (named := later_windows_differ(self.subject, seen, self.clipping.clip)):
            return named
        if self.subject.random and runs_in_evaluation_mode(seen):
            return f"the model runs in evaluation mode, in which {', '.join(self.subject.random)} does nothing"
        return ""


ROUNDS = (
    ", at other parameters too, and float64 agrees: the loop rounds sums or gradients, perhaps; keep them in float32"
)


def _by_parameter(trace: Trace, reference: Trace) -> Iterator[ParameterDifference]:
    zero, whole = torch.zeros((), dtype=torch.float64), reference.grad_norm

    def beside(name: str) -> ParameterDifference:
        found, expected = trace.gradients.get(name, zero), reference.gradients.get(name, zero)
        size = norm({name: expected})
        return ParameterDifference(name, ratio(norm({name: found - expected}), whole), ratio(norm({name: found}), size))

    yield from sorted(map(beside, reference.gradients), key=lambda each: -each.relative_difference)

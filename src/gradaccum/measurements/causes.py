"""Why cuts and the full batch differ, told from what was seen of each cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradaccum.measurements.judging import CutDiagnosis
from gradaccum.measurements.model_causes import Cause, model_causes
from gradaccum.measurements.randomness import Quiet
from gradaccum.measurements.subject import Subject


def causes(subject: Subject, quiet: Quiet, judged: Sequence[CutDiagnosis]) -> Iterator[Cause]:
    """Why the judged cuts differ, as far as they do, and what was turned off to see it."""
    if quiet.names:
        finding = f"{', '.join(quiet.names)} draws other random numbers for each cut."
        yield Cause("randomness", finding, UNSEEN if quiet.in_evaluation else ACCEPT, quiet.names)
    wrong = [cut for cut in judged if not cut.equivalent]
    for cut in wrong:
        if cut.mistake:
            yield Cause("loop", f"cut {list(cut.cut)}: {cut.mistake}.", DIVIDE, (str(list(cut.cut)),))
    models = list(model_causes(subject, wrong[0])) if wrong else []
    yield from models
    for cut in wrong:
        if not cut.mistake and not models:
            yield _unexplained(cut)
    if judged and not wrong:
        yield from _numerics(judged)


def _unexplained(cut: CutDiagnosis) -> Cause:
    """Neither a mistake of the loop nor a layer or a loss that mixes samples."""
    where = (str(list(cut.cut)),)
    if cut.reported:
        told, right = cut.reported
        finding = (
            f"cut {where[0]}: the loss differs: the step returns {told:.6g}, and the window's mean is {right:.6g}."
        )
        return Cause("reported loss", finding, REPORTED, where)
    if cut.sums_its_parts:
        finding = f"cut {where[0]}: the micro-batches' own gradients add up to another than the whole batch's."
        return Cause("backward", finding, BACKWARD, where)
    return Cause("loop", f"cut {where[0]}: {cut.verdict.problems[0]}.", DIVIDE, where)


def _numerics(judged: Sequence[CutDiagnosis]) -> Iterator[Cause]:
    """What is left where all cuts are right."""
    lower = [cut for cut in judged if cut.precision]
    for precision in dict.fromkeys(cut.precision for cut in lower):
        worst = max(cut.single.grad_rel_diff for cut in lower if cut.precision == precision)
        finding = f"lower precision ({precision}): gradients differ by {worst:.1e}, about as a right step's do in it."
        yield Cause("numerics", finding, FINE)
    kinks = [cut for cut in judged if cut.is_a_kink]
    for cut in kinks:
        finding = f"cut {list(cut.cut)}: a kink. float64 agrees; in float32 a unit flipped at these parameters only"
        yield Cause("numerics", f"{finding}, which is {cut.single.grad_rel_diff:.1e} of the gradient.", FINE)
    rounding = [cut for cut in judged if cut not in lower and cut not in kinks]
    if rounding:
        worst = max(cut.single.grad_rel_diff for cut in rounding)
        clips = sorted({f"{cut.clip_norm:.4g}" for cut in judged if cut.clip_norm})
        clipped = (
            f" The loop clips to a norm of {', '.join(clips)}, as the full batch is clipped here." if clips else ""
        )
        narrowed = (
            " Part of the float64 run is computed in float32 (a .float()), to whose rounding it is held."
            if any(cut.is_narrowed for cut in judged)
            else ""
        )
        finding = f"float32 gradients differ by at most {worst:.1e} of their magnitude: rounding.{clipped}{narrowed}"
        yield Cause("numerics", finding, FINE)


ACCEPT = "Nothing to mend, since the expected gradient is the same. It is turned off in this comparison."
UNSEEN = (
    "Nothing to mend, since the expected gradient is the same. To turn it off, all but batch norms run in evaluation "
    "mode in this comparison, so whatever acts only in training was not compared."
)
DIVIDE = (
    "Call model.train(), divide each micro-batch's loss sum by the targets of the whole window, step once, at its end, "
    "and clear the gradients."
)
REPORTED = "The gradients are right. Return the window's loss sum over its targets, as a float or a tensor; or nothing."
BACKWARD = (
    "No fault of the loop: a layer's backward pass depends on the whole micro-batch (a hook that normalises gradients, "
    "Embedding(scale_grad_by_freq=True)). Apply it to the accumulated gradient instead."
)
FINE = "Nothing to mend."

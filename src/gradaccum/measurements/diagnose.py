"""Is accumulation right for this model, and for this training loop? If not: why, by evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from gradaccum.engine.batching import Batch, batch_size
from gradaccum.engine.objective import Objective
from gradaccum.errors import BatchError
from gradaccum.measurements.causes import causes
from gradaccum.measurements.evidence import batch_norms
from gradaccum.measurements.habits import with_the_loops_norms
from gradaccum.measurements.judging import CutDiagnosis, judge_cut
from gradaccum.measurements.model_causes import Cause
from gradaccum.measurements.subject import Step, Subject
from gradaccum.measurements.variants import scaled


@dataclass(frozen=True)
class Diagnosis:
    """What was found. `equivalent` is judged with randomness off, where there is any."""

    cuts: tuple[CutDiagnosis, ...]
    causes: tuple[Cause, ...]

    @property
    def equivalent(self) -> bool:
        return all(cut.equivalent for cut in self.cuts)


def diagnose(
    model_factory: Callable[[], nn.Module],
    objective: Objective,
    batch: Batch,
    *,
    cuts: Sequence[Sequence[int]] | None = None,
    step: Step | None = None,
    seed: int = 0,
) -> Diagnosis:
    """Compare one step over cuts of a batch with the step over the whole batch, and name the cause of a difference.

    Everything runs on the CPU, in float64 and float32, with torch's SGD.

    Args:
        model_factory: makes the float32 model; random numbers come from torch's global generator, seeded here.
        objective: the loss that training means to minimise.
        batch: at least two samples.
        cuts: sizes of micro-batches; None tries halves, an uneven cut and small pieces.
        step: `(model, optimizer, micro_batches)`, the training loop to audit; None audits this package's engine.
        seed: of the model's parameters.

    Raises:
        UnjudgedError: model and objective are random in a way that cannot be turned off, or not finite.
        BatchError: the batch cannot be cut.
    """
    samples = _require_cuts(batch, cuts or ())
    subject = Subject(
        model_factory, objective, batch, step or partial(scaled, objective=objective, clip_norm=None), seed
    )
    subject, quiet = subject.quiet()
    tried = [tuple(cut) for cut in cuts or default_cuts(samples, statistics=any(batch_norms(subject.model())))]
    subject = with_the_loops_norms(subject, tried[0])
    judged = tuple(judge_cut(subject, cut) for cut in tried)
    return Diagnosis(judged, tuple(causes(subject, quiet, judged)))


def _require_cuts(batch: Batch, cuts: Sequence[Sequence[int]]) -> int:
    """The batch's samples, all of which every cut must hold."""
    samples = batch_size(batch)
    if samples < 2:
        raise BatchError(f"a batch of {samples} sample cannot be cut. Give at least two samples.")
    for cut in cuts:
        if len(cut) < 2:
            raise BatchError(f"the cut {list(cut)} cuts nothing, so any loop would pass. Give two sizes or more.")
        if sum(cut) != samples:
            raise BatchError(
                f"the cut {list(cut)} adds up to {sum(cut)}, but the batch has {samples} samples. Give sizes that add "
                f"up to {samples}."
            )
    return samples


FEWEST_WITH_STATISTICS = 4


def default_cuts(samples: int, *, statistics: bool = False) -> list[tuple[int, ...]]:
    """Halves, an uneven cut, and up to eight pieces, of at least two samples each from six samples on.

    Args:
        samples: to cut, at least two; four for `statistics`.
        statistics: whether one sample alone cannot be run, since it has no batch statistics.
    """
    if statistics and samples < FEWEST_WITH_STATISTICS:
        raise BatchError(
            f"a batch norm needs two samples in each micro-batch, and a batch of {samples} cannot be cut so. Give at "
            f"least {FEWEST_WITH_STATISTICS} samples."
        )
    many = max(2, min(8, samples // 2))
    pieces = tuple(samples // many + (index < samples % many) for index in range(many))
    cuts = [(samples - samples // 2, samples // 2), (samples - samples // 3, samples // 3), pieces]
    smallest = 2 if statistics else 1
    return list(dict.fromkeys(cut for cut in cuts if min(cut) >= smallest))

"""Is accumulation right for this model, and for this training loop? If not: why, by evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import nn

from gradaccum.engine.batching import Batch, batch_size
from gradaccum.engine.objective import Objective
from gradaccum.errors import BatchError
from gradaccum.measurements.evidence import Pieces, batch_norms, with_frozen_batch_norms
from gradaccum.measurements.judging import CutDiagnosis, judge_cut
from gradaccum.measurements.randomness import Quiet, called
from gradaccum.measurements.subject import Step, Subject
from gradaccum.measurements.variants import scaled

Kind = Literal["loop", "batch norm", "mixing layers", "not separable", "moving state", "randomness", "numerics"]


@dataclass(frozen=True)
class Cause:
    """Why cut and full batch differ, in words; `where` names layers or cuts."""

    kind: Kind
    finding: str
    advice: str
    where: tuple[str, ...] = ()


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
    samples = batch_size(batch)
    if samples < 2:
        raise BatchError(f"a batch of {samples} sample cannot be cut. Give at least two samples.")
    for cut in cuts or ():
        if len(cut) < 2:
            raise BatchError(f"the cut {list(cut)} cuts nothing, so any loop would pass. Give two sizes or more.")
    subject = Subject(
        model_factory, objective, batch, step or partial(scaled, objective=objective, clip_norm=None), seed
    )
    subject, quiet = subject.quiet()
    judged = tuple(judge_cut(subject, tuple(cut)) for cut in cuts or default_cuts(samples))
    return Diagnosis(judged, tuple(causes(subject, quiet, judged)))


def default_cuts(samples: int) -> list[tuple[int, ...]]:
    """Halves, an uneven cut, and up to eight pieces of at least two samples (one alone has no batch statistics)."""
    many = max(2, min(8, samples // 2))
    pieces = tuple(samples // many + (index < samples % many) for index in range(many))
    cuts = [(samples - samples // 2, samples // 2), (samples - samples // 3, samples // 3), pieces]
    return list(dict.fromkeys(cut for cut in cuts if 0 not in cut))


def causes(subject: Subject, quiet: Quiet, judged: Sequence[CutDiagnosis]) -> Iterator[Cause]:
    """Why the judged cuts differ, as far as they do, and what was turned off to see it."""
    if quiet.names:
        finding = f"{', '.join(quiet.names)} draws other random numbers for each cut."
        yield Cause("randomness", finding, ACCEPT, quiet.names)
    wrong = [cut for cut in judged if not cut.equivalent]
    loops = [cut for cut in wrong if cut.mistake]
    models = list(_model_causes(subject, wrong[0])) if wrong else []
    for cut in loops if loops or models else wrong:
        finding = f"cut {list(cut.cut)}: {cut.mistake or cut.verdict.problems[0]}."
        yield Cause("loop", finding, DIVIDE, (str(list(cut.cut)),))
    yield from models
    if judged and not wrong:
        worst = max(cut.single.grad_rel_diff for cut in judged)
        clips = sorted({f"{cut.clip_norm:.4g}" for cut in judged if cut.clip_norm})
        clipped = (
            f" The loop clips to a norm of {', '.join(clips)}, as the full batch is clipped here." if clips else ""
        )
        finding = f"float32 gradients differ by at most {worst:.1e} of their magnitude: rounding.{clipped}"
        yield Cause("numerics", finding, FINE)


def _model_causes(subject: Subject, found: CutDiagnosis) -> Iterator[Cause]:
    """Whether the loss of the whole batch is the sum over its cuts at all, and what keeps it from that."""
    cut, model = found.cut, subject.model()
    pieces = Pieces(subject.model, subject.objective, partial(subject.window, dtype=torch.float64), found.match)
    norms = dict(batch_norms(model))
    if pieces.mixing_module(cut) in norms:
        layers = tuple(called(*layer) for layer in norms.items())
        finding = f"{', '.join(layers)} in training mode normalises by the statistics of each micro-batch."
        yield Cause("batch norm", finding, GROUP_NORM, layers)
        pieces = replace(pieces, make_model=lambda: with_frozen_batch_norms(subject.model()))
    moving = pieces.moving_state(cut)
    if moving:
        finding = f"every forward pass changes {', '.join(moving)}, on which the next one's gradient depends."
        yield Cause("moving state", finding, STILL, moving)
    mixing = pieces.mixing_module(cut)
    if mixing is not None:
        layer = called(mixing, model.get_submodule(mixing))
        yield Cause("mixing layers", f"{layer} lets one sample's output depend on the others.", UNMIX, (layer,))
    elif not pieces.are_separable(cut):
        yield Cause("not separable", "the loss is no sum over samples, although no layer mixes them.", NEGATIVES)


STILL = (
    "A window has as many such changes as micro-batches, where the full batch has one. Accept that, if it is small, or "
    "hold the state still in all passes but the first (spectral norm: eval mode of its parametrization)."
)
ACCEPT = "Nothing to mend, since the expected gradient is the same. It is turned off in this comparison."
DIVIDE = (
    "Call model.train(), divide each micro-batch's loss sum by the targets of the whole window, step once, at its end, "
    "and clear the gradients."
)
GROUP_NORM = (
    "Replace it by GroupNorm or LayerNorm, freeze its statistics (eval mode of these layers), or accept that it sees "
    "micro-batches. With it frozen, what else is listed here remains."
)
UNMIX = "Let the layer treat each sample by itself, or accept that accumulation trains on the micro-batch's mixture."
NEGATIVES = (
    "Accumulation cannot give this gradient: each sample is compared with its micro-batch only, so a contrastive loss "
    "loses negatives. Raise micro_batch, or cache the embeddings of the whole batch (GradCache, arXiv 2101.06983)."
)
FINE = "Nothing to mend."

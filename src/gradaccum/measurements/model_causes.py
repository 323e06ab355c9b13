"""Why a model or an objective cannot be cut: the causes, with what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from gradaccum.measurements.evidence import Pieces, batch_norms, with_frozen_batch_norms
from gradaccum.measurements.judging import CutDiagnosis
from gradaccum.measurements.randomness import called
from gradaccum.measurements.subject import Subject

Kind = Literal[
    "loop",
    "reported loss",
    "batch norm",
    "mixing layers",
    "not separable",
    "moving state",
    "backward",
    "randomness",
    "numerics",
]


@dataclass(frozen=True)
class Cause:
    """Why cut and full batch differ, in words; `where` names layers or cuts."""

    kind: Kind
    finding: str
    advice: str
    where: tuple[str, ...] = ()


def model_causes(subject: Subject, found: CutDiagnosis) -> Iterator[Cause]:
    """Whether the loss of the whole batch is the sum over its cuts at all, and what keeps it from that."""
    cut, model = found.cut, subject.model()
    pieces = Pieces(subject.model, subject.objective, partial(subject.window, dtype=torch.float64), found.match)
    norms = dict(batch_norms(model))
    if pieces.mixing_module(cut) in norms:
        layers = tuple(called(*layer) for layer in norms.items())
        finding = f"{', '.join(layers)} in training mode normalises by the statistics of each micro-batch."
        untracked = any(layer.running_mean is None for layer in norms.values())
        yield Cause("batch norm", finding, UNTRACKED if untracked else GROUP_NORM, layers)
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
        yield _not_separable(pieces, cut)


def _not_separable(pieces: Pieces, cut: Sequence[int]) -> Cause:
    if pieces.is_a_mean(cut):
        return Cause("not separable", "loss_sum returns a mean: over the whole batch it is no sum over the cut's.", SUM)
    if pieces.has_a_constant(cut):
        return Cause("not separable", "loss_sum adds the same in every pass, whatever its samples.", OWN_TERM)
    return Cause("not separable", "the loss is no sum over samples, although no layer mixes them.", NEGATIVES)


STILL = (
    "A window has as many such changes as micro-batches, where the full batch has one. Accept that, if it is small, or "
    "hold the state still in all passes but the first (spectral norm: eval mode of its parametrization)."
)
GROUP_NORM = (
    "Replace it by GroupNorm or LayerNorm, freeze its statistics (eval mode of these layers), or accept that it sees "
    "micro-batches. With it frozen, what else is listed here remains."
)
UNTRACKED = (
    "Replace it by GroupNorm or LayerNorm, or accept that it sees micro-batches. It keeps no running statistics "
    "(track_running_stats=False), so eval mode would change nothing. Without it, what else is listed here remains."
)
UNMIX = "Let the layer treat each sample by itself, or accept that accumulation trains on the micro-batch's mixture."
SUM = "Return the sum over the targets from loss_sum (reduction='sum'), and from count how many they are."
OWN_TERM = (
    "Give it a term of its own that counts 1 in each micro-batch: Objective(loss_sum, count, weights), where both "
    "functions return one value a name; or leave it to the optimizer (weight_decay)."
)
NEGATIVES = (
    "Accumulation cannot give this gradient: what a sample adds depends on the others of its micro-batch (a "
    "contrastive loss's negatives, a balance of experts, a rank). Raise micro_batch; or mean it to be averaged "
    "over micro-batches, as a term of its own that counts 1 in each; or, where samples are compared, cache the "
    "embeddings of the whole batch (GradCache, arXiv 2101.06983)."
)

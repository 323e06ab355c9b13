"""What a loop does beside summing one window's gradient: leaves it for the next window, forgets train()."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradaccum.measurements.clips import TORCHS_EPSILON, Clip
from gradaccum.measurements.comparison import same
from gradaccum.measurements.evidence import batch_norms, with_frozen_batch_norms
from gradaccum.measurements.mistake import flat_gradient
from gradaccum.measurements.watching import NEARLY, SETTINGS, Seen, watch

if TYPE_CHECKING:
    from gradaccum.measurements.subject import Subject

WINDOWS = 3
"""As many as a loop is watched for: what it does every second time shows in the third."""


def watch_windows(subject: Subject, cut: Sequence[int]) -> list[Seen]:
    """The same samples, window after window."""
    return watch(subject, (subject.window(cut, torch.float64) for _ in range(WINDOWS)))


def later_windows_differ(subject: Subject, seen: Sequence[Seen], clip: Clip | None) -> str:
    """How a later window's gradient differs from the full batch's, in words; empty where it does not.

    The full batch's is taken where the loop left the model, so that what it does to learning rates or weights between
    windows is its own affair.
    """
    for before, window in pairwise(seen):
        if window.found is None:
            return "the optimizer steps in one window, and not in the next"
        expected = _full_batch_gradient_at(subject, window)
        if not expected.isfinite().all():
            return ""  # the samples have been learned too fast, which is no fault of the loop
        if not any(_is_clipped(window.found, expected, clip, epsilon=epsilon) for epsilon in (0.0, TORCHS_EPSILON)):
            return _kept(before, window)
    return _lost_momentum(*seen[:2])


def _full_batch_gradient_at(subject: Subject, window: Seen) -> Tensor:
    model, (whole,) = subject.model(), subject.window([subject.samples], torch.float64)
    model.load_state_dict(window.state)
    return flat_gradient(model, subject.objective.share(model, whole, subject.objective.totals([whole])))


def _is_clipped(found: Tensor, expected: Tensor, clip: Clip | None, *, epsilon: float) -> bool:
    return same(found, clip.of(expected, epsilon=epsilon) if clip else expected, NEARLY)


def _kept(before: Seen, window: Seen) -> str:
    assert window.found is not None
    if before.found is not None and same(window.found, before.found + window.brought, NEARLY):
        return "the next window's gradient also holds this one's: gradients are not cleared between windows"
    return "the next window's gradient is another than the full batch's: the loop keeps something from this one"


def _lost_momentum(first: Seen, second: Seen) -> str:
    if first.found is None or second.found is None or first.momentum is None or second.momentum is None:
        return ""
    if same(second.momentum, first.found * SETTINGS.momentum + second.found, NEARLY):
        return ""
    return "the optimizer's state after the next window is not what two steps leave: the loop clears or changes it"


def runs_in_evaluation_mode(seen: Sequence[Seen]) -> bool:
    """Whether the loop trains in evaluation mode, in any window."""
    return any(False in window.training for window in seen)


def with_the_loops_norms(subject: Subject, cut: Sequence[int]) -> Subject:
    """Compared with batch norms in evaluation mode where the loop trains so, as it may mean to."""
    if not any(batch_norms(subject.model())):
        return subject
    resting = watch(subject, [subject.window(cut, torch.float64)])[0].resting
    make = subject.model_factory
    return replace(subject, model_factory=lambda: with_frozen_batch_norms(make(), resting)) if resting else subject

"""Whether a loop clips, and rightly: once, at the end of the window, what is the right gradient without the clip."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import unwrap
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from gradaccum.engine.batching import Batch, batch_size, split
from gradaccum.measurements.comparison import same
from gradaccum.measurements.watching import NEARLY, parallel, watch

if TYPE_CHECKING:
    from gradaccum.measurements.subject import Subject

TINY, HUGE = 2.0**-40, 2.0**40
"""Powers of two, which round nothing: under the first no clip acts, under the second every one."""

TORCHS_EPSILON = 1e-6
"""What `torch.nn.utils.clip_grad_norm_` adds to the norm that it divides by."""


@dataclass(frozen=True)
class Clip:
    """The whole gradient is scaled down, once, to a norm of at most `limit`; `kind` is 2 or infinity."""

    limit: float
    kind: float

    def of(self, gradient: Tensor, *, epsilon: float = TORCHS_EPSILON) -> Tensor:
        size = float(torch.linalg.vector_norm(gradient, self.kind))
        return gradient * min(1.0, self.limit / (size + epsilon))

    def is_one_of(self, asked: Sequence[float]) -> bool:
        """A loop that divides after its clip leaves less than it asked for; one that asks nothing clips by itself."""
        return not asked or any(abs(self.limit - norm) <= NEARLY * norm for norm in asked)


@contextmanager
def norms_asked_for() -> Iterator[list[float]]:
    """The norms that torch's clip is called with, however it was imported."""
    asked: list[float] = []
    code, before = unwrap(clip_grad_norm_).__code__, sys.getprofile()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is code:
            asked.append(float(frame.f_locals["max_norm"]))

    sys.setprofile(look)
    try:
        yield asked
    finally:
        sys.setprofile(before)


@dataclass(frozen=True)
class Clipping:
    """What clips there are in a loop.

    Attributes:
        clip: where there is one, and it is right.
        norm: L2 norm to which torch's clip would bring this window's gradient likewise; None where it is not reached.
        mistake: what is wrong with it, in words.
        unclipped: the gradient that a clip hides, where it does.
    """

    clip: Clip | None = None
    norm: float | None = None
    mistake: str = ""
    unclipped: Tensor | None = None


def clipping_of(subject: Subject, cut: Sequence[int], right: Tensor) -> Clipping:
    """Scale all that the backward passes bring, down and up, and see what the optimizer is given.

    Args:
        subject: the loop, and what it trains.
        cut: sizes of the window's micro-batches.
        right: the gradient that the loop should sum.
    """
    plain = watch(subject, [subject.window(cut, torch.float64)])[0]
    if plain.found is None or not plain.found.isfinite().all() or not plain.brought.any():
        return Clipping()  # without leaves' hooks (torch.func) nothing can be scaled
    low = _found(subject, subject.window(cut, torch.float64), TINY)
    with norms_asked_for() as asked:
        high = _found(subject, subject.window(cut, torch.float64), HUGE)
    if low is None or high is None:
        return Clipping()
    if not same(low / TINY, right, subject.match):
        hidden = parallel(low, plain.found) and not same(low / TINY, plain.found, subject.match)
        return Clipping(unclipped=low / TINY if hidden else None)
    bites = not same(plain.found, right, subject.match)
    if not parallel(high, right):
        once = not bites and _of_entries(high, right)
        return Clipping(mistake="" if once else AFTER_EVERY if not bites else AFTER_EVERY_OR_OTHERWISE)
    if same(high, right * HUGE, NEARLY):
        return Clipping()
    clip = _kind(subject, cut, high)
    if clip is None or not clip.is_one_of(asked) or not parallel(plain.found, right):
        return Clipping(mistake=DEPENDS)
    if not bites:
        return Clipping(clip)
    if not any(same(plain.found, clip.of(right, epsilon=epsilon), NEARLY) for epsilon in (0.0, TORCHS_EPSILON)):
        return Clipping(mistake=DEPENDS)
    size, norm = float(plain.found.norm()), float(right.norm())
    return Clipping(clip, size * (norm + TORCHS_EPSILON) / norm)


AFTER_EVERY = "it clips after every micro-batch, although no clip is reached on this batch; clip once, before the step"
AFTER_EVERY_OR_OTHERWISE = (
    "the clip changes the gradient's direction: it is applied after every micro-batch, or to each parameter or entry "
    "alone; clip the norm of the whole gradient once, before the step"
)
DEPENDS = (
    "what the clip leaves depends on the window beside its gradient: it is clipped, and then divided, perhaps; divide "
    "first"
)


def _found(subject: Subject, window: Sequence[Batch], factor: float) -> Tensor | None:
    found = watch(subject, [window], factor=factor)[0].found
    return found if found is not None and found.isfinite().all() else None


def _of_entries(found: Tensor, right: Tensor) -> bool:
    """Whether a clip of each entry by its value, applied once, makes this of a huge gradient."""
    limit = float(found.abs().max())
    return same(found, (right * HUGE).clamp(-limit, limit), NEARLY)


def _kind(subject: Subject, cut: Sequence[int], high: Tensor) -> Clip | None:
    """The norm that a window of fewer samples is brought to likewise; None where there is no such norm."""
    fewer = [
        split(piece, [size - size // 2, size // 2])[0] if size > 1 else piece for piece, size in _sized(subject, cut)
    ]
    other = _found(subject, fewer, HUGE)
    for kind in (2.0, float("inf")):
        limit = float(torch.linalg.vector_norm(high, kind))
        if other is None or abs(float(torch.linalg.vector_norm(other, kind)) - limit) <= NEARLY * limit:
            return Clip(limit, kind)
    return None


def _sized(subject: Subject, cut: Sequence[int]) -> list[tuple[Batch, int]]:
    return [(piece, batch_size(piece)) for piece in subject.window(cut, torch.float64)]

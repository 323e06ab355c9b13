"""What a window minimises: sums over targets, and how many targets there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradaccum.engine.batching import Batch
from gradaccum.engine.gradients import HALF
from gradaccum.errors import BatchError, ConfigError

ONE_TERM: Mapping[str, float] = {"": 1.0}
"""An objective of one term, which needs no name."""

WIDE = frozenset({torch.float32, torch.float64})

WHOLE = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})

LARGEST_COUNT = 1e300
"""So that the sum over a window is a number still."""

USUAL_COUNT = 2**53
"""Whole numbers up to this need no closer look."""

FEW = 256
"""So many labels are counted in a Python list before torch has dispatched two kernels."""


@dataclass(frozen=True)
class Objective:
    """A loss that can be accumulated: its sum and its count are known for each micro-batch.

    The window's loss is `sum of loss_sum / sum of count`, so a micro-batch weighs as much as it has targets. A loss of
    several terms, each with a divisor of its own, names them in `weights`; then both functions return one value a name,
    and the window's loss is `sum over terms of weight * (sum of its loss_sum / sum of its count)`.

    Args:
        loss_sum: `(model, batch)` to the scalar **sum** of the loss over the batch's targets, never their mean; for
            several terms a mapping from name to such a sum, all from one forward pass.
        count: `batch` to the number of its targets (or the sum of their weights); must not need the model. For several
            terms a mapping from name to count; a term that is averaged over micro-batches counts 1 in each.
        weights: the weight of each named term; None for a loss of one term.

    Raises:
        ConfigError: no terms, or a weight that is not finite.
    """

    loss_sum: Callable[[nn.Module, Batch], Any]
    count: Callable[[Batch], Any]
    weights: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if not callable(self.loss_sum) or not callable(self.count):
            raise ConfigError("loss_sum and count must be functions: of (model, batch) and of (batch).")
        if self.weights is None:
            return
        if not self.weights:
            raise ConfigError("weights={} names no term, so there is nothing to minimise. Name one, or leave it out.")
        if not isinstance(self.weights, Mapping):
            raise ConfigError(
                f"weights={self.weights!r} names no weights. Give a mapping from each term to its weight."
            )
        for name, weight in self.weights.items():
            if not isinstance(weight, Real) or not abs(weight) < float("inf"):
                raise ConfigError(
                    f"the weight of {name!r} is {weight!r}, so every loss would be. Give a finite number."
                )
        object.__setattr__(self, "weights", {name: float(weight) for name, weight in self.weights.items()})

    @property
    def terms(self) -> Mapping[str, float]:
        """The weight of each term by name."""
        return ONE_TERM if self.weights is None else self.weights

    def counts(self, window: Sequence[Batch]) -> list[list[float]]:
        """Targets, `[term][micro-batch]`."""
        returned = list(map(self.count, window))
        if self.weights is None:
            return [_numbers(returned, terms=1)]
        terms = len(self.weights)
        numbers = _numbers([each for counts in returned for each in self._by_term(counts, "count")], terms=terms)
        return [numbers[term::terms] for term in range(terms)]

    def totals(self, window: Sequence[Batch]) -> list[float]:
        """Targets of the whole window, one count a term: what divides its loss."""
        return [sum(of_term) for of_term in self.counts(window)]

    def share(self, model: nn.Module, batch: Batch, totals: Sequence[float]) -> Tensor:
        """A micro-batch's part of the loss that `totals` divide, as one scalar to differentiate.

        Over a window's own totals the shares of its micro-batches add up to its loss; over the micro-batch's own
        totals it is the micro-batch's mean.
        """
        counts = self.totals([batch])
        parts = [
            loss_sum * (weight / total)
            for loss_sum, weight, total, count in zip(
                self.loss_sums(model, batch), self.terms.values(), totals, counts, strict=True
            )
            if count
        ]
        return torch.stack(parts).sum() if parts else torch.zeros((), requires_grad=True)

    def loss_sums(self, model: nn.Module, batch: Batch) -> Sequence[Tensor]:
        """The scalar loss sum of each term over one micro-batch, at least float32, from one forward pass."""
        returned = self.loss_sum(model, batch)
        if self.weights is None:
            return (loss_sum_of(returned),)
        return [loss_sum_of(loss_sum) for loss_sum in self._by_term(returned, "loss_sum")]

    def _by_term(self, returned: Any, what: str) -> list[Any]:
        assert self.weights is not None
        if not isinstance(returned, Mapping) or returned.keys() != self.weights.keys():
            got = sorted(returned) if isinstance(returned, Mapping) else f"a {type(returned).__name__}"
            raise BatchError(
                f"Objective.{what} returned {got}, but weights names the terms {sorted(self.weights)}. "
                "Return a mapping with exactly these names."
            )
        return [returned[name] for name in self.weights]

    @classmethod
    def classification(cls, *, ignore_index: int = -100, class_weights: Tensor | None = None) -> Objective:
        """Cross-entropy over `batch = (inputs, labels)`; labels equal to `ignore_index` are no targets.

        Shapes: the model maps inputs to logits `[..., classes]`; labels are `[...]`, integers. Half-precision logits
        are compared in float32.

        Args:
            ignore_index: the label that marks what is not a target.
            class_weights: `[classes]`; a target of class c counts `class_weights[c]`, in the sum as in the count, as
                in `torch.nn.CrossEntropyLoss(weight=...)`, but over the whole window.
        """

        def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
            inputs, labels = batch
            logits = model(inputs)
            if logits.dtype in HALF:
                logits = logits.float()
            if logits.dim() != 2 or labels.dim() != 1:
                _require_alike(logits, labels)
                logits, labels = logits.flatten(0, -2), labels.flatten()
            if labels.dtype is not torch.int64:  # the kernels know no shorter labels
                labels = labels.long()
            weight = None if class_weights is None else class_weights.to(logits)
            return F.cross_entropy(logits, labels, weight=weight, ignore_index=ignore_index, reduction="sum")

        def count(batch: Batch) -> Tensor | int:
            labels = _labels_of(batch)
            if class_weights is not None:
                return class_weights.to(labels.device, torch.float64)[labels[labels != ignore_index]].sum()
            if labels.is_cpu and labels.numel() <= FEW:
                flat: list[int] = (labels if labels.dim() == 1 else labels.flatten()).tolist()
                return len(flat) - flat.count(ignore_index)
            return torch.count_nonzero(labels != ignore_index)

        return cls(loss_sum, count)


def _labels_of(batch: Batch) -> Tensor:
    """The second of a pair, which is asked for each micro-batch: what is usual is told by types alone."""
    if (type(batch) not in (tuple, list) and not isinstance(batch, tuple | list)) or len(batch) != 2:
        raise BatchError(
            f"a micro-batch is a {type(batch).__name__} and no pair (inputs, labels), which is what "
            "Objective.classification compares. Give pairs, or an Objective(loss_sum, count) that knows your batches. "
            "(Of a whole batch, give its pieces: split(batch, micro_batch).)"
        )
    labels: Tensor = batch[1]
    if (kind := getattr(labels, "dtype", type(labels).__name__)) not in WHOLE:
        raise BatchError(
            f"labels are {kind}, not whole numbers in a tensor, so which of them are targets cannot be told. Give the "
            "class of each sample; for probabilities of classes, give an Objective(loss_sum, count) of your own."
        )
    return labels


def _require_alike(logits: Tensor, labels: Tensor) -> None:
    if logits.shape[:-1] != labels.shape:
        raise BatchError(
            f"logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)} do not match, and "
            "flattened they would be paired wrongly. Return logits [..., classes] for labels [...]."
        )


def _numbers(counts: list[Any], *, terms: int) -> list[float]:
    """What an objective returned for a window, as numbers of targets; `terms` in turn for each micro-batch."""
    for count in counts:
        if type(count) is not int or not 0 <= count <= USUAL_COUNT:
            break
    else:
        return counts
    counts = _read(counts)
    for index, count in enumerate(counts):
        if not isinstance(count, int | float) or not 0 <= count <= LARGEST_COUNT:
            raise _no_count(index // terms, count)
    return counts


def _read(counts: Sequence[Any]) -> list[Any]:
    """Counts as plain numbers; those on an accelerator are read with one copy."""
    away = [count for count in counts if _is_away(count)]
    read = iter(torch.stack(away).tolist() if away else ())
    return [next(read) if _is_away(count) else _number(count) for count in counts]


def _is_away(count: Any) -> bool:
    return isinstance(count, Tensor) and not count.is_cpu and not count.dim()


def _number(count: Any) -> Any:
    """Of tensors and numpy's scalars of no dimensions the number; what is none is left to be refused."""
    return count.item() if getattr(count, "ndim", None) == 0 and hasattr(count, "item") else count


def _no_count(index: int, count: Any) -> BatchError:
    return BatchError(
        f"micro-batch {index} of the window counts {count!r:.40} targets, and nothing can be divided by that. "
        f"Return a number from 0 to {LARGEST_COUNT:g} from Objective.count."
    )


def loss_sum_of(returned: Any) -> Tensor:
    """What an objective returned as one term's loss sum: a scalar, widened to float32 where it is narrower."""
    if not isinstance(returned, Tensor):
        raise BatchError(
            f"Objective.loss_sum returned a {type(returned).__name__}, not a tensor, so there is nothing to "
            "differentiate. Return the sum of the loss as torch computed it, without .item() or float()."
        )
    if returned.dim():
        raise BatchError(
            f"Objective.loss_sum returned a tensor of shape {tuple(returned.shape)}, not a scalar, so there is no one "
            "loss to differentiate. Return the sum over the micro-batch's targets (reduction='sum')."
        )
    if returned.dtype in WIDE:
        return returned
    if returned.dtype not in HALF:
        raise BatchError(
            f"Objective.loss_sum returned a loss of type {returned.dtype}, of which there is no gradient to step on. "
            "Return a real floating-point number."
        )
    return returned.float()

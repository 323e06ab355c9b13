"""Random windows against the float64 full batch: whatever the cut, mask, weights, clip, optimizer and number format."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gradaccum import Accumulator, Objective, master_weights, split
from gradaccum.engine import gradients
from tests.engine.reference import CLASSES, make_batch, make_model

IGNORED = -100
UNIT_ROUNDOFF = {torch.float64: 2**-53, torch.float32: 2**-24, torch.bfloat16: 2**-8}
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


@dataclass(frozen=True)
class Case:
    """One window and how to step on it."""

    cut: list[int]
    masked: list[bool]
    class_weights: list[float] | None
    clip_norm: float | None
    optimizer: str
    dtype: torch.dtype
    wide: str
    seed: int

    def batch(self) -> tuple[Tensor, Tensor]:
        inputs, labels = make_batch(sum(self.cut), self.dtype, seed=self.seed)
        return inputs, torch.where(torch.tensor(self.masked), IGNORED, labels)

    def weights(self) -> Tensor | None:
        return None if self.class_weights is None else torch.tensor(self.class_weights, dtype=torch.float64)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    cut = draw(st.lists(st.integers(1, 6), min_size=1, max_size=9))
    dtype = draw(st.sampled_from(list(UNIT_ROUNDOFF)))
    masked = st.lists(st.booleans(), min_size=sum(cut), max_size=sum(cut))
    return Case(
        cut=cut,
        masked=draw(masked | st.just([False] * sum(cut))),
        class_weights=draw(st.none() | st.lists(st.floats(0.05, 20), min_size=CLASSES, max_size=CLASSES)),
        clip_norm=draw(st.none() | st.floats(1e-3, 10)),
        optimizer=draw(st.sampled_from(list(OPTIMIZERS))),
        dtype=dtype,
        wide=draw(st.sampled_from(["sums", "masters"])) if dtype == torch.bfloat16 else "native",
        seed=draw(st.integers(0, 1000)),
    )


EVERYTHING_MASKED = Case([2, 3], [True] * 5, None, 1.0, "adamw", torch.float32, "native", 0)


@settings(max_examples=150, deadline=None, derandomize=True)
@example(EVERYTHING_MASKED)
@given(cases())
def test_any_window_has_the_gradient_of_its_full_batch(case: Case) -> None:
    model, exact = make_model(case.dtype), make_model(case.dtype).double()
    masters = master_weights(model) if case.wide == "masters" else None
    stepped = list(model.parameters()) if masters is None else masters
    optimizer = OPTIMIZERS[case.optimizer](stepped, lr=0.1)
    before = [parameter.detach().clone() for parameter in stepped]
    step = Accumulator(
        model,
        optimizer,
        Objective.classification(class_weights=case.weights()),
        clip_norm=case.clip_norm,
        accum_dtype=torch.float32 if case.wide == "sums" else None,
        master_weights=masters,
    ).step(split(case.batch(), case.cut))

    if all(case.masked):
        assert not step.applied
        assert all(map(torch.equal, stepped, before))
        return
    loss, reference, magnitude = full_batch(exact, case)
    unit = UNIT_ROUNDOFF[case.dtype]
    bound = unit * (32 + 2 * math.sqrt(len(case.cut))) * magnitude
    norm = float(gradients.global_norm(reference))
    assert abs(float(step.grad_norm) - norm) <= bound
    assert abs(float(step.loss) - loss) <= 32 * unit * abs(loss)
    factor = 1.0 if case.clip_norm is None else min(1.0, case.clip_norm / (norm + 1e-6))
    found = [parameter.grad for parameter in stepped]
    assert distance(found, [part * factor for part in reference]) <= (2 * bound if case.clip_norm else bound)
    assert all(map(torch.equal, stepped, stepped_by_torch(case, before, found)))
    if masters is not None:
        assert all(map(torch.equal, model.parameters(), [master.bfloat16() for master in masters]))


def full_batch(exact: nn.Module, case: Case) -> tuple[float, list[Tensor], float]:
    """Float64 mean loss, its gradient, and the norm of the summed magnitudes of the micro-batches' parts of it."""
    inputs, labels = case.batch()
    weights = case.weights()
    counted = (torch.ones(CLASSES).double() if weights is None else weights)[labels[labels != IGNORED]].sum()
    parts = []
    total = 0.0
    for piece, piece_labels in split((inputs.double(), labels), case.cut):
        loss = F.cross_entropy(exact(piece), piece_labels, weight=weights, reduction="sum") / counted
        parts.append(torch.autograd.grad(loss, list(exact.parameters())))
        total += loss.item()
    by_parameter = [torch.stack(of_one) for of_one in zip(*parts, strict=True)]
    magnitude = gradients.global_norm([of_one.abs().sum(0) for of_one in by_parameter])
    return total, [of_one.sum(0) for of_one in by_parameter], float(magnitude)


def distance(found: list[Tensor | None], expected: list[Tensor]) -> float:
    return float(gradients.global_norm([left.double() - right for left, right in zip(found, expected, strict=True)]))


def stepped_by_torch(case: Case, before: list[Tensor], found: list[Tensor | None]) -> list[Tensor]:
    """torch's own optimizer, once, on the gradient that the engine left."""
    parameters = [nn.Parameter(value) for value in before]
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient
    OPTIMIZERS[case.optimizer](parameters, lr=0.1).step()
    return parameters

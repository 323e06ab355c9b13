"""What the noise scale observes is untouched by clip, precision and parameters, and touches none of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradaccum.engine.accumulator import Accumulator
from gradaccum.engine.batching import split
from gradaccum.engine.noise_scale import NoiseScale
from gradaccum.engine.objective import Objective
from gradaccum.errors import BatchError, ConfigError
from tests.engine.gaussian_mean import NEAREST, Mean, by_hand, frozen, gaussian, per_sample_gradients


@pytest.mark.parametrize("cut", [[4, 4, 4, 4], [5, 4, 3, 4], [1, 15]])
@pytest.mark.parametrize(
    "options", [{"clip_norm": 1e-3}, {"precision": "fp16"}, {"precision": "fp16", "clip_norm": 1e-3}]
)
def test_clip_and_loss_scale_change_nothing_of_what_a_window_tells(options: dict[str, Any], cut: list[int]) -> None:
    batch = gaussian(16, features=7, shift=0.3, generator=torch.Generator().manual_seed(1))
    model, noise = Mean(7).float(), NoiseScale()
    frozen(model, noise, **options).step(split(batch.float(), cut))
    (window,) = noise.windows()
    expected = by_hand(per_sample_gradients(model, batch), cut)
    assert (window.trace, window.grad_sq_norm) == pytest.approx(expected, rel=1e-4)


def test_a_window_that_overflowed_under_the_loss_scale_is_left_out_and_the_next_is_right() -> None:
    batch = gaussian(16, features=7, shift=0.3, generator=torch.Generator().manual_seed(1))
    model, noise = Mean(7).float(), NoiseScale()
    accumulator = frozen(model, noise, precision="fp16")
    assert not accumulator.step(split(1e35 * batch.float(), [5, 4, 3, 4])).applied
    accumulator.step(split(batch.float(), [5, 4, 3, 4]))
    (window,) = noise.windows()
    assert window.trace == pytest.approx(by_hand(per_sample_gradients(model, batch), [5, 4, 3, 4])[0], rel=1e-4)


def test_watching_changes_no_gradient_and_leaves_no_hook() -> None:
    batch = gaussian(16, features=7, shift=0.3, generator=torch.Generator().manual_seed(1))
    found = []
    for noise in (None, NoiseScale()):
        model = Mean(7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Accumulator(model, optimizer, NEAREST, observer=noise).step(split(batch, [5, 4, 3, 4]))
        assert not model.mean._backward_hooks
        found.append((model.mean.detach().clone(), model.mean.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_an_interrupted_window_leaves_no_hook_and_tells_nothing() -> None:
    model, noise = Mean(7), NoiseScale()
    accumulator = frozen(model, noise)
    batch = gaussian(16, features=7, shift=0.3, generator=torch.Generator().manual_seed(1))
    with pytest.raises(RuntimeError):
        accumulator.step([batch[:8], torch.zeros(8, 6)])
    assert not model.mean._backward_hooks
    accumulator.step(split(batch, [5, 4, 3, 4]))
    (window,) = noise.windows()
    assert window.trace == pytest.approx(by_hand(per_sample_gradients(model, batch), [5, 4, 3, 4])[0])


def test_windows_of_one_micro_batch_are_refused_at_once_with_a_hint() -> None:
    model = Mean(7)
    before = model.mean.detach().clone()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), NEAREST, observer=NoiseScale())
    with pytest.raises(BatchError, match=r"1 micro-batch.*accum_steps=2 with half the micro_batch"):
        accumulator.step([torch.ones(4, 7)])
    assert torch.equal(model.mean, before)


def test_a_parameter_that_is_used_twice_has_one_gradient() -> None:
    tied = Objective(
        loss_sum=lambda model, batch: 0.25 * ((model.mean - batch) + (model.mean - batch)).square().sum() / 2,
        count=len,
    )
    batch = gaussian(16, features=7, shift=0.3, generator=torch.Generator().manual_seed(1))
    seen = []
    for objective in (NEAREST, tied):
        noise = NoiseScale()
        frozen(Mean(7), noise, objective).step(split(batch, [5, 4, 3, 4]))
        seen += noise.windows()
    assert seen[0].trace == pytest.approx(seen[1].trace)


def test_a_frozen_parameter_is_no_part_of_it() -> None:
    model, noise = Mean(7), NoiseScale()
    model.unused.requires_grad_(False)
    frozen(model, noise).step(split(torch.randn(8, 7, dtype=torch.float64), 2))
    assert len(noise.windows()) == 1


def test_a_loss_of_named_terms_is_refused() -> None:
    terms = Objective(
        loss_sum=lambda model, batch: {"near": NEAREST.loss_sum(model, batch)},
        count=lambda batch: {"near": len(batch)},
        weights={"near": 1.0},
    )
    with pytest.raises(ConfigError, match="the terms near, each with a count and weight of its own"):
        frozen(Mean(7), NoiseScale(), terms)


def test_half_precision_gradients_are_measured_in_float32() -> None:
    batch = gaussian(16, features=7, shift=300.0, generator=torch.Generator().manual_seed(1))
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        model, noise = Mean(7).to(dtype), NoiseScale()
        accumulator = Accumulator(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            Objective(loss_sum=lambda model, batch: (model.mean * batch).sum(), count=len),
            observer=noise,
            accum_dtype=torch.float32 if dtype == torch.bfloat16 else None,
        )
        accumulator.step(split(batch.to(dtype), [5, 4, 3, 4]))
        found += noise.windows()
    assert found[1].grad_sq_norm == pytest.approx(found[0].grad_sq_norm, rel=0.02)

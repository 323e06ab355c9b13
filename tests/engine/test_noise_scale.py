from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradaccum.engine.accumulator import Accumulator
from gradaccum.engine.batching import split
from gradaccum.engine.noise_scale import NoiseScale, WindowNoise, estimate
from gradaccum.engine.objective import Objective
from gradaccum.errors import BatchError, ConfigError

CUTS = [[4, 4, 4, 4], [5, 4, 3, 4], [1, 15], [2, 3, 11], [1] * 16]


class Mean(nn.Module):
    """One vector m; the gradient of a sample x's loss 0.5 |m - x|^2 is m - x."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(features, dtype=torch.float64))
        self.unused = nn.Parameter(torch.zeros(3, dtype=torch.float64))


NEAREST = Objective(
    loss_sum=lambda model, batch: 0.5 * (model.mean - batch).square().sum(),
    count=len,
)


def frozen(model: nn.Module, noise: NoiseScale, objective: Objective = NEAREST, **options: float) -> Accumulator:
    """An accumulator that never moves, so that all windows are of one distribution."""
    return Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.0), objective, observer=noise, **options)


def gaussian(samples: int, *, features: int, shift: float, generator: torch.Generator) -> Tensor:
    return shift + torch.randn(samples, features, generator=generator, dtype=torch.float64)


def per_sample_gradients(model: Mean, batch: Tensor) -> Tensor:
    return model.mean.detach() - batch


def by_hand(gradients: Tensor, cut: Sequence[int]) -> tuple[float, float]:
    """S and |G|^2 from every sample's gradient, in the formulas' own words."""
    means = torch.stack([part.mean(dim=0) for part in gradients.split(list(cut))])
    whole = gradients.mean(dim=0)
    counts = torch.tensor(cut, dtype=torch.float64)
    trace = (counts * (means - whole).square().sum(dim=1)).sum() / (len(cut) - 1)
    return float(trace), float(whole.square().sum() - trace / len(gradients))


@pytest.mark.parametrize("cut", CUTS)
def test_a_window_tells_the_variance_between_its_micro_batches(cut: list[int]) -> None:
    model, noise = Mean(7), NoiseScale()
    batch = gaussian(16, features=7, shift=0.3, generator=torch.Generator().manual_seed(1))
    frozen(model, noise).step(split(batch, cut))
    (window,) = noise.windows()
    assert (window.trace, window.grad_sq_norm) == pytest.approx(by_hand(per_sample_gradients(model, batch), cut))
    assert window.weight == len(cut) - 1


@pytest.mark.parametrize("small", [1, 4])
def test_for_equal_counts_the_estimates_are_the_papers(small: int) -> None:
    model, noise = Mean(7), NoiseScale()
    batch = gaussian(16, features=7, shift=0.3, generator=torch.Generator().manual_seed(1))
    frozen(model, noise).step(split(batch, small))
    gradients = per_sample_gradients(model, batch)
    of_big = float(gradients.mean(dim=0).square().sum())
    of_small = float(gradients.view(-1, small, 7).mean(dim=1).square().sum(dim=1).mean())
    (window,) = noise.windows()
    assert window.grad_sq_norm == pytest.approx((16 * of_big - small * of_small) / (16 - small))
    assert window.trace == pytest.approx((of_small - of_big) / (1 / small - 1 / 16))


@pytest.mark.parametrize("cut", [[4] * 8, [5, 4, 3, 4], [1, 15], [2, 3, 11, 1]])
def test_the_known_noise_scale_of_a_linear_model_lies_within_the_interval(cut: list[int]) -> None:
    features, shift = 20, 0.5
    true = features / (features * shift**2)  # tr(Sigma) / |G|^2, with Sigma the identity and G = -shift everywhere
    held = 0
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        model, noise = Mean(features), NoiseScale()
        accumulator = frozen(model, noise)
        for _ in range(40):
            batch = gaussian(sum(cut), features=features, shift=shift, generator=generator)
            accumulator.step(split(batch, cut))
        found = noise.estimate()
        assert found.noise_scale == pytest.approx(true, rel=0.2)
        assert found.low < found.noise_scale < found.high
        held += found.low < true < found.high
    assert held >= 16  # 19 are expected of 20 at 95 %


def test_each_part_of_the_estimate_is_unbiased_on_uneven_cuts() -> None:
    features, shift, cut = 5, 0.4, [1, 6, 2]
    generator = torch.Generator().manual_seed(0)
    model, noise = Mean(features), NoiseScale()
    accumulator = frozen(model, noise)
    for _ in range(4000):
        accumulator.step(split(gaussian(9, features=features, shift=shift, generator=generator), cut))
    found = noise.estimate()
    assert found.trace == pytest.approx(features, rel=0.03)
    assert found.grad_sq_norm == pytest.approx(features * shift**2, rel=0.08)


def test_the_gradient_is_seen_before_it_is_clipped() -> None:
    batch = gaussian(16, features=7, shift=0.3, generator=torch.Generator().manual_seed(1))
    seen = []
    for options in ({}, {"clip_norm": 1e-3}):
        noise = NoiseScale()
        frozen(Mean(7), noise, **options).step(split(batch, [5, 4, 3, 4]))
        seen += noise.windows()
    assert seen[0] == seen[1]


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


def test_micro_batches_without_targets_are_not_counted() -> None:
    counted = Objective(
        loss_sum=lambda model, batch: 0.5 * ((model.mean - batch[0]).square().sum(dim=1) * batch[1]).sum(),
        count=lambda batch: batch[1].sum(),
    )
    batch = gaussian(9, features=7, shift=0.3, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([1.0] * 6 + [0.0] * 3)
    model, noise = Mean(7), NoiseScale()
    accumulator = frozen(model, noise, counted)
    accumulator.step(split((batch, mask), [4, 2, 3]))
    accumulator.step(split((batch, torch.zeros(9)), [4, 2, 3]))
    (window,) = noise.windows()
    assert window.weight == 1
    assert window.trace == pytest.approx(by_hand(per_sample_gradients(model, batch[:6]), [4, 2])[0])


def test_windows_of_one_micro_batch_are_refused_at_once_with_a_hint() -> None:
    model = Mean(7)
    before = model.mean.detach().clone()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), NEAREST, observer=NoiseScale())
    with pytest.raises(BatchError, match=r"1 micro-batch.*accum_steps=2 with half the micro_batch"):
        accumulator.step([torch.ones(4, 7)])
    assert torch.equal(model.mean, before)


def test_a_last_window_of_one_micro_batch_is_left_out() -> None:
    model, noise = Mean(7), NoiseScale()
    accumulator = frozen(model, noise)
    for sizes in ([2, 2], [3]):
        accumulator.step([torch.randn(size, 7, dtype=torch.float64) for size in sizes])
    assert len(noise.windows()) == 1


def test_a_gradient_that_overflowed_is_left_out() -> None:
    model, noise = Mean(7), NoiseScale()
    accumulator = frozen(model, noise)
    accumulator.step([torch.full((2, 7), 1e200, dtype=torch.float64)] * 2)
    assert noise.windows() == []
    with pytest.raises(BatchError, match="no window"):
        noise.estimate()


def test_numerator_and_denominator_are_averaged_before_they_are_divided() -> None:
    windows = [WindowNoise(1.0, 0.01, 3), WindowNoise(3.0, 1.0, 3)]
    assert estimate(windows).noise_scale == pytest.approx(4.0 / 1.01)  # a mean of ratios would be 51.5


def test_a_window_weighs_as_many_comparisons_as_it_holds() -> None:
    windows = [WindowNoise(1.0, 1.0, 1), WindowNoise(5.0, 1.0, 3)]
    assert estimate(windows).noise_scale == pytest.approx(4.0)


def test_a_gradient_lost_in_noise_has_an_infinite_noise_scale_and_no_upper_bound() -> None:
    draws = np.random.default_rng(0).normal(size=30)
    found = estimate([WindowNoise(1.0, float(draw - draws.mean() - 0.1), 1) for draw in draws])
    assert found.noise_scale == math.inf
    assert 0 < found.low < found.high == math.inf


def test_identical_micro_batches_have_no_noise() -> None:
    model, noise = Mean(7), NoiseScale()
    accumulator = frozen(model, noise)
    for _ in range(4):
        accumulator.step([torch.ones(4, 7, dtype=torch.float64)] * 3)
    assert noise.estimate().noise_scale == pytest.approx(0.0, abs=1e-12)


def test_windows_that_depend_on_their_neighbours_widen_the_interval() -> None:
    generator = np.random.default_rng(0)
    independent = 1 + 0.3 * generator.standard_normal(240)
    runs = np.repeat(independent[:40], 6)
    found = [estimate([WindowNoise(1.0, float(value), 1) for value in values]) for values in (independent, runs)]
    assert (found[1].high - found[1].low) > 1.5 * (found[0].high - found[0].low)


def test_the_loss_scale_of_fp16_is_taken_out() -> None:
    batch = gaussian(16, features=7, shift=0.3, generator=torch.Generator().manual_seed(1)).float()
    seen = []
    for precision in ("float32", "fp16"):
        model, noise = Mean(7).float(), NoiseScale()
        accumulator = Accumulator(
            model, torch.optim.SGD(model.parameters(), lr=0.0), NEAREST, observer=noise, precision=precision
        )
        accumulator.step(split(batch, [5, 4, 3, 4]))
        seen += noise.windows()
    assert seen[0].trace == pytest.approx(seen[1].trace, rel=1e-5)
    assert seen[0].grad_sq_norm == pytest.approx(seen[1].grad_sq_norm, rel=1e-4)


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

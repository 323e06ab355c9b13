from __future__ import annotations

from itertools import product

import pytest
import torch
from scipy.stats import binom

from gradaccum.engine.batching import split
from gradaccum.engine.noise_scale import NoiseScale
from gradaccum.engine.objective import Objective
from gradaccum.errors import BatchError
from tests.engine.gaussian_mean import Mean, by_hand, frozen, gaussian, per_sample_gradients

CUTS = [[4, 4, 4, 4], [5, 4, 3, 4], [1, 15], [2, 3, 11], [1] * 16]


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


def test_the_known_noise_scale_of_a_linear_model_lies_within_nineteen_of_twenty_intervals() -> None:
    features, shift, seeds, held = 20, 0.5, 60, 0
    true = features / (features * shift**2)  # tr(Sigma) / |G|^2, with Sigma the identity and G = -shift everywhere
    cuts = [[4] * 8, [5, 4, 3, 4], [1, 15], [2, 3, 11, 1]]
    for cut, seed in product(cuts, range(seeds)):
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
    least, most = binom.interval(0.999, len(cuts) * seeds, 0.95)
    assert least <= held <= most


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


def test_identical_micro_batches_have_no_noise() -> None:
    model, noise = Mean(7), NoiseScale()
    accumulator = frozen(model, noise)
    for _ in range(4):
        accumulator.step([torch.ones(4, 7, dtype=torch.float64)] * 3)
    assert noise.estimate().noise_scale == pytest.approx(0.0, abs=1e-12)


def test_the_noise_scale_is_told_along_training_too() -> None:
    generator = torch.Generator().manual_seed(0)
    model, noise = Mean(7), NoiseScale()
    accumulator = frozen(model, noise)
    for shift in (2.0, 0.5):
        for _ in range(100):
            accumulator.step(split(gaussian(16, features=7, shift=shift, generator=generator), 4))
    first, last = noise.along(2)
    assert first.noise_scale == pytest.approx(1 / 2.0**2, rel=0.2)
    assert last.noise_scale == pytest.approx(1 / 0.5**2, rel=0.2)
    assert first.high < last.low

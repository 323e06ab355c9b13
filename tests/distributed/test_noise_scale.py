"""Over ranks the noise scale is that of one process with all their micro-batches."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from gradaccum import Accumulator, ConfigError, NoiseScale, split
from tests.distributed import models
from tests.distributed.pool import Pool
from tests.engine.reference import CLASSIFICATION, make_batch, make_model

CASES = [(world, shares) for world, all_shares in models.SHARES.items() for shares in all_shares]
STEPS = 3


def observed(shares: models.Shares) -> list[dict[str, Any]]:
    noise = NoiseScale()
    models.train_shares("ddp", shares, num_steps=STEPS, observer=noise)
    return [asdict(window) for window in noise.windows()]


def observed_on_one_process(world: int, shares: models.Shares) -> list[dict[str, Any]]:
    model, noise = make_model(), NoiseScale()
    accumulator = Accumulator(model, models.OPTIMIZERS["sgd"](model), CLASSIFICATION, observer=noise)
    for each in [models.SHARES[world][0], *[shares] * (STEPS - 1)]:
        accumulator.step(split(make_batch(), [size for share in each for size in share]))
    return [asdict(window) for window in noise.windows()]


@pytest.mark.parametrize(("world", "shares"), CASES)
def test_ranks_add_up_to_one_window_over_all_their_micro_batches(
    ranks: Pool, world: int, shares: models.Shares
) -> None:
    expected = observed_on_one_process(world, shares)
    assert len(expected) == STEPS
    for found in ranks(world, observed, shares):
        assert [window["weight"] for window in found] == [window["weight"] for window in expected]
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12)


def refused(wrap: str) -> str:
    with pytest.raises(ConfigError) as error:
        models.accumulator_of(wrap, observer=NoiseScale())
    return str(error.value)


def test_gradients_that_never_exist_by_parameter_are_refused(ranks: Pool) -> None:
    for said in ranks(2, refused, "fsdp2"):
        assert "observer=NoiseScale looks at the parameters' gradients" in said

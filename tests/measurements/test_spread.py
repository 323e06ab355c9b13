from __future__ import annotations

import pytest
from torch import nn

from gradaccum.measurements.spread import layers_of, uneven_share


@pytest.mark.parametrize(("micro_batch", "accum_steps", "world_size"), [(4, 1, 2), (1, 2, 2), (4, 3, 3), (5, 3, 4)])
def test_an_uneven_share_has_as_many_samples_in_unequal_parts(
    micro_batch: int, accum_steps: int, world_size: int
) -> None:
    share = uneven_share(micro_batch, accum_steps, world_size)
    assert len(share) == world_size
    assert sum(map(sum, share)) == micro_batch * accum_steps * world_size
    assert sum(share[0]) < sum(share[-1])
    assert max(map(max, share)) <= micro_batch


def test_layers_that_share_a_parameter_stay_together() -> None:
    apart = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))
    assert list(layers_of(apart)) == [apart[0], apart[2]]
    apart[2].weight = apart[0].weight
    assert list(layers_of(apart)) == []

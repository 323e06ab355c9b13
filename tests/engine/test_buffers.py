from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradaccum.engine.ranks import buffers_unchanged
from tests.engine.trials import Stubborn


def values(model: Stubborn) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("error", [None, ValueError])
def test_a_pass_that_fails_leaves_every_buffer_as_it_was(error: type[Exception] | None) -> None:
    model = Stubborn(error)
    kept, before = dict(model.named_buffers()), values(model)

    def run() -> None:
        with buffers_unchanged(model):
            model(torch.ones(7, 5))

    if error:
        with pytest.raises(error, match="hidden"):
            run()
    else:
        run()
    assert model.made is None
    assert all(kept[name] is buffer for name, buffer in model.named_buffers())
    assert all(torch.equal(before[name], buffer) for name, buffer in values(model).items())


def test_a_buffer_that_is_no_number_is_put_back_too() -> None:
    model = Stubborn(None)
    model.running.fill_(float("nan"))
    with buffers_unchanged(model):
        model.running.zero_()
    assert model.running.isnan().all()

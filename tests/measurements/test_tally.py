from __future__ import annotations

import torch
from torch import nn

from gradaccum.measurements.tally import Tally

KILO = 1024


def kilo(number: int = 1) -> torch.Tensor:
    return torch.empty(number * KILO, dtype=torch.uint8)


def test_a_storage_counts_once_however_many_tensors_view_it() -> None:
    with Tally() as tally:
        whole = kilo(4)
        views = [whole[:KILO], whole.view(2, -1), whole.detach(), whole.t()]
    assert tally.total == 4 * KILO
    del whole, views[1:]
    assert tally.total == 4 * KILO
    del views
    assert tally.total == 0


def test_the_peak_is_the_most_that_lived_at_once() -> None:
    with Tally() as tally:
        kept = [kilo(1)]
        for size in (2, 5, 3):
            kept.clear()
            kept.append(kilo(size))
    assert tally.peak().total == 5 * KILO
    assert tally.total == 3 * KILO


def test_what_lived_before_the_mode_was_on_does_not_count() -> None:
    before = kilo(8)
    with Tally() as tally:
        after = before + 1
    assert tally.total == after.nbytes


def test_a_kind_given_after_the_peak_still_names_what_was_live_there() -> None:
    with Tally() as tally:
        weights, scratch = kilo(3), kilo(2)
        del scratch
        tally.label([weights], "parameters")
        more = kilo(1)
    peak = tally.peak()
    assert peak.by_kind["parameters"] == 3 * KILO
    assert peak.by_kind["temporaries"] == 2 * KILO
    assert more.nbytes == KILO


def test_a_reset_forgets_the_peak_and_keeps_what_lives() -> None:
    with Tally() as tally:
        kept, gone = kilo(1), kilo(9)
        del gone
        tally.reset_peak()
        small = kilo(2)
    assert tally.peak().total == 3 * KILO
    assert kept.nbytes + small.nbytes == 3 * KILO


def test_sizes_are_rounded_up_as_the_allocator_rounds_them() -> None:
    with Tally(block=512) as tally:
        odd = [torch.empty(size, dtype=torch.uint8) for size in (1, 512, 513)]
    assert tally.total == 512 + 512 + 1024
    assert len(odd) == 3


def test_what_backward_makes_is_seen() -> None:
    model = nn.Linear(32, 16, bias=False)
    inputs = torch.randn(8, 32)
    with Tally() as tally:
        model(inputs).sum().backward()
    assert model.weight.grad is not None
    assert tally.total == model.weight.grad.nbytes + model.weight.nbytes  # of which an operation gave a view
    assert tally.peak().total > tally.total

from __future__ import annotations

import weakref
from collections import namedtuple
from collections.abc import Iterator

import pytest
import torch

from gradaccum import BatchError, BatchPlan, ConfigError, split, windows


def test_a_plan_says_how_many_backward_passes_a_step_takes() -> None:
    assert BatchPlan(effective_batch=512, micro_batch=32, world_size=2).accum_steps == 8


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((10, 4, 1), r"effective_batch=10 is not a multiple of micro_batch=4 x world_size=1 = 4.*such as 8"),
        ((12, 4, 2), r"effective_batch=12 is not a multiple of micro_batch=4 x world_size=2 = 8"),
        ((0, 4, 1), r"effective_batch=0 is not positive"),
        ((8, -1, 1), r"micro_batch=-1 is not positive"),
        ((8, 4, 0), r"world_size=0 is not positive"),
        ((4, 8, 1), r"effective_batch=4 is smaller than micro_batch=8.*Lower micro_batch to at most 4"),
        ((4, 1, 8), r"effective_batch=4 is smaller than world_size=8"),
        ((8.0, 4, 1), r"effective_batch=8.0 is not an integer"),
        ((True, 1, 1), r"effective_batch=True is not an integer"),
    ],
)
def test_a_plan_that_cannot_be_met_says_what_why_and_what_to_do(sizes: tuple[int, int, int], message: str) -> None:
    effective, micro, world = sizes
    with pytest.raises(ConfigError, match=message):
        BatchPlan(effective_batch=effective, micro_batch=micro, world_size=world)


@pytest.mark.parametrize(("size", "sizes"), [(12, [12]), (5, [5, 5, 2]), (1, [1] * 12), ([5, 4, 3], [5, 4, 3])])
def test_a_split_keeps_every_sample_in_order(size: int | list[int], sizes: list[int]) -> None:
    batch = torch.arange(24).view(12, 2)
    pieces = split(batch, size)
    assert [len(piece) for piece in pieces] == sizes
    assert torch.equal(torch.cat(pieces), batch)


def test_a_split_keeps_the_structure_and_copies_nothing() -> None:
    Pair = namedtuple("Pair", ["left", "right"])
    batch = {"ids": torch.arange(3), "pair": Pair(torch.ones(3, 2), [torch.zeros(3)])}
    first, second = split(batch, 2)
    assert isinstance(second["pair"], Pair)
    assert second["pair"].right[0].shape == (1,)
    assert first["ids"].data_ptr() == batch["ids"].data_ptr()


@pytest.mark.parametrize(
    ("batch", "size", "message"),
    [
        ((torch.ones(3), torch.ones(4)), 2, r"have \[3, 4\] samples in dim 0"),
        (torch.tensor(1.0), 1, r"no dimensions"),
        ((), 1, r"holds no tensor"),
        ((torch.ones(3), "text"), 1, r"holds a str"),
        (torch.ones(3), [1, 1], r"the cut \[1, 1\] adds up to 2, but the batch has 3 samples"),
    ],
)
def test_what_cannot_be_split_is_refused(batch: object, size: int | list[int], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        split(batch, size)


def test_a_micro_batch_of_no_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"micro_batch=0 is not positive"):
        split(torch.ones(3), 0)


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize(
    ("batches", "accum_steps", "lengths"),
    [(8, 4, [4, 4]), (9, 4, [4, 4, 1]), (3, 4, [3]), (1, 1, [1]), (5, 1, [1] * 5), (0, 4, []), (7, 4, [4, 3])],
)
def test_windows_cover_every_micro_batch_once_and_in_order(
    batches: int, accum_steps: int, lengths: list[int], sized: bool
) -> None:
    loader = list(range(batches)) if sized else iter(range(batches))
    found = list(windows(loader, accum_steps))
    assert [len(window) for window in found] == lengths
    assert [batch for window in found for batch in window] == list(range(batches))


@pytest.mark.parametrize(("batches", "kept"), [(9, 2), (8, 2), (3, 0), (0, 0)])
def test_a_short_last_window_is_left_out_on_request(batches: int, kept: int) -> None:
    assert [len(window) for window in windows(range(batches), 4, drop_last=True)] == [4] * kept


def test_windows_read_the_loader_only_as_far_as_they_are_asked() -> None:
    read: list[int] = []

    def loader() -> Iterator[int]:
        for index in range(100):
            read.append(index)
            yield index

    ahead = windows(loader(), 4)
    assert read == []
    next(ahead)
    assert read == [0, 1, 2, 3]


def test_windows_hold_at_most_one_window() -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def loader() -> Iterator[torch.Tensor]:
        for _ in range(12):
            alive.append(sum(ref() is not None for ref in made))
            batch = torch.zeros(1)
            made.append(weakref.ref(batch))
            yield batch
            del batch

    ahead = windows(loader(), 4)
    while next(ahead, None):
        pass
    assert max(alive) <= 4


@pytest.mark.parametrize("accum_steps", [0, -1, 2.0])
def test_windows_of_no_micro_batches_are_refused_before_anything_is_read(accum_steps: int) -> None:
    with pytest.raises(ConfigError, match="accum_steps="):
        windows([], accum_steps)

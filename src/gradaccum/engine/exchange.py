"""A few numbers told by every rank to every other: the engine's one use of a collective beside gradient reduction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from gradaccum.errors import RankError

LOST = ("gloo/transport", "closed by peer", "reset by peer", "broken pipe", "caused pair closure")
"""Words in the errors of a collective whose other side is gone; gloo's have no exception type of their own."""

LATE = ("timed out waiting", "timeout caused pair closure")
"""Words in those whose other side never came."""


def several_ranks() -> bool:
    """Whether this process is one of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def exchange(told: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """What every rank of the group told, one row a rank, the same bits on all of them.

    Args:
        told: `[numbers]`, of one length on all ranks.
        group: None for all ranks.

    Raises:
        RankError: another rank is gone.
    """
    here = told.to(_place(told, group))
    heard = [torch.empty_like(here) for _ in range(dist.get_world_size(group))]
    with lost_ranks():
        dist.all_gather(heard, here, group=group)
    return torch.stack(heard)


def _place(told: Tensor, group: dist.ProcessGroup | None) -> torch.device:
    """NCCL takes CUDA tensors only; gloo is surest with the CPU's."""
    if dist.get_backend(group) == "nccl":
        bound = getattr(group or dist.group.WORLD, "bound_device_id", None)  # of init_process_group(device_id=...)
        return bound or torch.device("cuda", torch.cuda.current_device())
    return told.device if "nccl" in dist.get_backend_config(group) else torch.device("cpu")


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Say in words what a collective's error means where another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        explain_lost(error)
        raise


def explain_lost(error: BaseException) -> None:
    """Raise what a collective's error means, where it means that another rank is gone."""
    if isinstance(error, RuntimeError) and not isinstance(error, RankError) and _says_lost(error):
        first = str(error).partition("\n")[0].strip()
        raise RankError(f"{_what_happened(str(error).lower())} No step was taken. ({first})") from error


def _what_happened(text: str) -> str:
    if any(words in text for words in LATE):
        return (
            "another rank did not come within the process group's timeout, so there is no whole gradient to step on. "
            "It hangs (in loading data, say), takes longer than init_process_group(timeout=...) allows, or goes "
            "through other modules of a sharded model than this rank."
        )
    return (
        "another rank was lost in the middle of a window, so there is no whole gradient to step on. The rank that "
        "failed first says why, unless it was killed."
    )


def _says_lost(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in LOST)

"""One window on several ranks: what they agree on before its first pass, and sum up after its last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradaccum.engine import gradients
from gradaccum.engine.batching import Batch, require_window, samples_in
from gradaccum.engine.buffers import Buffers
from gradaccum.engine.exchange import exchange, explain_lost
from gradaccum.engine.objective import Objective
from gradaccum.engine.replicas import require_same_replicas
from gradaccum.engine.step_result import LossSums
from gradaccum.engine.traffic import Traffic, traffic_of
from gradaccum.engine.wrapping import data_parallel, is_sharded
from gradaccum.errors import BatchError, ConfigError, RankError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

READY, NOTHING_TO_REPLAY, FAILED = 0, 1, 2

NOTHING: tuple[None, Sequence[float]] = (None, ())
"""Replayed by nobody."""


Pass = tuple[Batch, Sequence[float]]
"""A micro-batch and its targets, one count a term."""


@dataclass(slots=True)
class Work:
    """A window as this rank goes through it.

    Attributes:
        batches: its own micro-batches, in order; those without targets are left out.
        counts: their targets, `[term][micro-batch]`.
        complete: every term has targets in each of them.
        all_passes: how many every rank makes; what this one lacks, it makes up by replaying.
        replayed: what it replays, which is to add nothing.
        totals: targets over the whole window and all ranks, one a term.
        samples: of the window, on all ranks.
    """

    batches: Sequence[Batch]
    counts: Sequence[Sequence[float]]
    complete: bool
    all_passes: int
    replayed: Pass
    totals: Sequence[float]
    samples: int


class Ranks(Protocol):
    """How a window is shared out; `world_size` is what gradient reduction divides by."""

    world_size: int

    def share(self, objective: Objective, window: Sequence[Batch]) -> Work: ...

    def local(self, found: Sequence[Tensor]) -> Sequence[Tensor]:
        """This rank's part of each gradient."""

    def conclude(self, sums: LossSums, local: Sequence[Tensor]) -> tuple[LossSums, Tensor]:
        """Loss sums and global gradient norm over all ranks."""

    def explain(self, error: BaseException) -> None:
        """Raises what the error of a collective means, where its other side is gone."""


class OneProcess:
    """All of the window is here."""

    world_size = 1

    def share(self, objective: Objective, window: Sequence[Batch]) -> Work:
        """Targets of every micro-batch, counted before the first pass."""
        require_window(window)
        if not window:
            raise BatchError("the window is empty, so there is no gradient to step on. Give at least one micro-batch.")
        return _own(objective, window)

    def local(self, found: Sequence[Tensor]) -> Sequence[Tensor]:
        return found

    def conclude(self, sums: LossSums, local: Sequence[Tensor]) -> tuple[LossSums, Tensor]:
        return sums, gradients.global_norm(local)

    def explain(self, error: BaseException) -> None:
        del error  # nobody else is there


class ManyRanks:
    """The window is spread over the ranks of a group, each with micro-batches of its own; some may have none."""

    def __init__(self, group: dist.ProcessGroup | None, traffic: Traffic, *, shards: int | None = None) -> None:
        self.group = group
        self.traffic = traffic
        self.world_size = dist.get_world_size(group)
        self.sharded = shards is not None
        self.held = (shards or 1) / self.world_size
        self._kept: Pass | None = None

    def share(self, objective: Objective, window: Sequence[Batch]) -> Work:
        """Agree on targets and passes: every rank makes as many as the one with the most, replaying a batch it keeps.

        So every rank reduces equally often, and the collectives inside a sharded model's passes pair up.
        """
        own, error = self._try(objective, window)
        self._keep(own, objective, [] if error else window)
        status = FAILED if error else READY if self._kept else NOTHING_TO_REPLAY
        told = exchange(_numbers([status, len(own.batches), own.samples, *own.totals]), self.group)
        passes, samples = int(told[:, 1].max()), int(told[:, 2].sum())
        self._require_ready(told[:, 0].tolist(), error, passes)
        totals = told[:, 3:].sum(0).tolist()
        return Work(own.batches, own.counts, own.complete, passes, self._kept or NOTHING, totals, samples)

    def _try(self, objective: Objective, window: Sequence[Batch]) -> tuple[Work, Exception | None]:
        """An error here must not leave the other ranks waiting; they hear of it first."""
        try:
            require_window(window)
            return _own(objective, window), None
        except Exception as error:  # noqa: BLE001 (raised again once the others know)
            return _own(objective, []), error

    def _keep(self, own: Work, objective: Objective, window: Sequence[Batch]) -> None:
        if own.batches:
            self._kept = own.batches[-1], [of_term[-1] for of_term in own.counts]
        elif window and self._kept is None:
            self._kept = window[-1], [0.0] * len(objective.terms)

    def _require_ready(self, statuses: Sequence[float], error: Exception | None, passes: int) -> None:
        if error is not None:
            raise error
        if FAILED in statuses:
            raise RankError(
                f"rank {statuses.index(FAILED)} could not count the targets of its window, and says why in a message "
                "of its own. No rank has stepped."
            )
        if passes and NOTHING_TO_REPLAY in statuses:
            raise BatchError(
                f"rank {statuses.index(NOTHING_TO_REPLAY)} has had no micro-batch so far, so it has nothing to take "
                f"part with in the {passes} passes of the others. Give every rank at least one micro-batch first, "
                "such as by a DistributedSampler."
            )

    def local(self, found: Sequence[Tensor]) -> Sequence[Tensor]:
        return [cast("DTensor", each).to_local() for each in found] if self.sharded else found

    def conclude(self, sums: LossSums, local: Sequence[Tensor]) -> tuple[LossSums, Tensor]:
        """One exchange of loss sums and squared norms; times `held`, each entry of the gradient counts once in all."""
        norm = gradients.global_norm(local)
        squares = norm.double().square() * self.held
        own = [sums.sum(term).to(squares) for term in range(len(sums.totals))]
        order = squares.new_tensor(float(self.traffic.order))
        told = exchange(torch.stack([order, squares, *own]), self.group).to(norm.device)
        if self.sharded:
            _require_one_order(told[:, 0].tolist())
        square, *losses = told[:, 1:].sum(0)
        return LossSums([loss.to(norm) for loss in losses], sums.totals), square.sqrt().to(norm)

    def explain(self, error: BaseException) -> None:
        explain_lost(error)


def ranks_of(model: nn.Module) -> Ranks:
    """How the model's windows are shared out: over the ranks that its gradients are reduced over.

    Raises:
        ConfigError: their parameters differ.
    """
    require_same_replicas(model)
    if (ddp := data_parallel(model)) is not None:
        return ManyRanks(ddp.process_group, traffic_of(model))
    if is_sharded(model):
        mesh = next(each for each in model.parameters() if each.requires_grad).device_mesh  # type: ignore[attr-defined]
        return ManyRanks(None, traffic_of(model), shards=mesh.size(-1))
    return OneProcess()


@contextmanager
def buffers_unchanged(model: nn.Module) -> Iterator[None]:
    """A replayed pass must not enter running statistics a second time; SyncBatchNorm's are those of all ranks."""
    before = Buffers(module for module in model.modules() if not isinstance(module, nn.SyncBatchNorm))
    try:
        yield
    finally:
        before.restore()


def _own(objective: Objective, window: Sequence[Batch]) -> Work:
    samples = sum(map(samples_in, window))
    counts = objective.counts(window)
    totals = list(map(sum, counts))
    complete = all(map(all, counts))  # as they nearly always are
    if not complete and not any(map(all, counts)):
        live = [any(of_batch) for of_batch in zip(*counts, strict=True)]
        window, counts = list(compress(window, live)), [list(compress(of_term, live)) for of_term in counts]
    return Work(window, counts, complete, len(window), NOTHING, totals, samples)


def _require_one_order(orders: Sequence[float]) -> None:
    if len(set(orders)) > 1:
        raise ConfigError(
            "the ranks went through the model's sharded parts in different orders, so that parameters and gradients of "
            "different parts were mixed up. Use the same modules in the same order on every rank (an unused one with a "
            "weight of zero), or DistributedDataParallel(find_unused_parameters=True)."
        )


def _numbers(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)

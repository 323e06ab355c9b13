"""Forward and backward of a window's micro-batches, each told whether it is to reduce gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Literal

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from gradaccum.engine import gradients, preflight
from gradaccum.engine.gradient_sync import syncing
from gradaccum.engine.objective import Objective
from gradaccum.engine.observer import Note
from gradaccum.engine.precision import NativeGradients, Precision, autocast
from gradaccum.engine.ranks import Ranks, Work, buffers_unchanged
from gradaccum.engine.step_result import LossSums
from gradaccum.engine.traffic import traffic_of


class Passes:
    """All passes of one model, window after window.

    Args:
        model: plain or spread over ranks.
        ranks: that it is spread over.
        into: takes in what each backward pass leaves.
        sync: whether the `last` pass of a window reduces, or `every` one.
        keep_gathered: as `gradient_sync` has it.
        precision: of forward and loss.

    Attributes:
        traffic: what the passes of a window reduced.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        into: NativeGradients,
        *,
        sync: Literal["last", "every"],
        keep_gathered: bool,
        precision: Precision,
    ) -> None:
        self.model = model
        self.several_ranks = ranks.world_size > 1
        self.into = into
        self.every = sync == "every"
        self.syncing, self.traffic = syncing(model, keep_gathered=keep_gathered), traffic_of(model)
        self.precision: Precision = precision
        self._looked = False

    def make(self, work: Work, objective: Objective, *, shares: Sequence[float], note: Note | None = None) -> LossSums:
        """Forward and backward of every micro-batch that has targets; returns this rank's loss sums.

        Args:
            work: what this rank has to do.
            objective: the loss.
            shares: what each term's loss sum is multiplied by.
            note: told of each pass, if given.
        """
        loss_sums = autocast(self.precision, self.into.parameters[0], objective.loss_sums)
        model, syncing, traffic, absorb = self.model, self.syncing, self.traffic, self.into.absorb
        losses: list[Tensor] = []
        seeds: list[Sequence[Tensor]] = []
        last, every, complete = work.all_passes, self.every, work.complete
        for number, batch in enumerate(work.batches):
            synced = every or number + 1 == last
            with syncing(synced):
                sums = loss_sums(model, batch)
                if not number:
                    if not self._looked and not is_dynamo_compiling():
                        self._look(sums)
                    seeds = gradients.seeds(sums, shares, passes=len(work.batches))
                if complete:
                    gradients.backward(sums, seeds[number])
                else:
                    live = [of_term[number] for of_term in work.counts]
                    gradients.backward(list(compress(sums, live)), list(compress(seeds[number], live)))
                    sums = [loss if count else loss.new_zeros(()) for loss, count in zip(sums, live, strict=True)]
            if note is not None:
                note(work.counts[0][number], shares[0])
            absorb()
            losses.extend(map(Tensor.detach, sums))
            traffic.sync_calls += synced
            del sums  # or this pass's graph would live through the next forward
        return LossSums(losses, work.totals)

    def replay(self, work: Work, objective: Objective) -> None:
        """Passes that add nothing, so that this rank takes part in as many as the others."""
        for number in range(len(work.batches) + 1, work.all_passes + 1):
            synced = self.every or number == work.all_passes
            with buffers_unchanged(self.model), self.syncing(synced):
                batch, of_batch = work.replayed
                sums = autocast(self.precision, self.into.parameters[0], objective.loss_sums)(self.model, batch)
                live = list(compress(sums, of_batch)) or sums
                gradients.backward(live, [torch.zeros_like(loss) for loss in live])
            self.into.absorb()
            self.traffic.sync_calls += synced

    def _look(self, sums: Sequence[Tensor]) -> None:
        self._looked = True
        preflight.meet_reentrant_checkpoints(sums, several_ranks=self.several_ranks)

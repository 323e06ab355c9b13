"""A user's own workload in which rank 1 fails in the middle of a window."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum import Objective, Workload
from tests.own_workload import regression


def failing(fail: Callable[[], None]) -> Workload:
    workload, calls = regression(), itertools.count(1)
    if os.environ["RANK"] != "1":
        # torchrun ends the others when it sees that one failed: on a busy machine, before they say what they saw.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal = lambda *_: None  # nor when the run's own handler is taken off

    def loss_sum(model: nn.Module, batch: Any) -> Tensor:
        if os.environ["RANK"] == "1" and torch.is_grad_enabled() and next(calls) == 40:
            fail()
        loss: Tensor = workload.objective.loss_sum(model, batch)
        return loss

    return replace(workload, objective=Objective(loss_sum, workload.objective.count))


def killed() -> Workload:
    return failing(lambda: os.kill(os.getpid(), signal.SIGKILL))


def raising() -> Workload:
    return failing(_raise)


def _raise() -> None:
    raise ArithmeticError("the loss is not to be had")

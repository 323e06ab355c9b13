"""The loops of other libraries, as their documentation shows them. Needs the extra `peers`."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from itertools import chain
from typing import Any

import lightning
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from benchmarks.loops import Loop, Run, Window, mean_loss

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


def accelerate(model: nn.Module, optimizer: Optimizer, accum_steps: int) -> Run:
    """`with accelerator.accumulate(model)`, which divides by the configured number of steps."""
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accum_steps, sync_each_batch=False)
    )
    prepared, stepping = accelerator.prepare(model, optimizer)

    def run(windows: Sequence[Window]) -> None:
        loader = accelerator.prepare(DataLoader(list(chain.from_iterable(windows)), batch_size=None))
        for batch in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(mean_loss(prepared, batch))
                stepping.step()
                stepping.zero_grad()

    return run


def fabric(model: nn.Module, optimizer: Optimizer, accum_steps: int) -> Run:
    """`no_backward_sync`, with the loss divided by hand, which the documentation leaves out."""
    return _fabric(model, optimizer, accum_steps, divisor=accum_steps)


def fabric_as_documented(model: nn.Module, optimizer: Optimizer, accum_steps: int) -> Run:
    """`no_backward_sync` and `fabric.backward(loss)`: nothing divides the loss."""
    return _fabric(model, optimizer, accum_steps, divisor=1)


def _fabric(model: nn.Module, optimizer: Optimizer, accum_steps: int, *, divisor: int) -> Run:
    runner = Fabric(accelerator="cpu", devices=1)
    prepared, stepping = runner.setup(model, optimizer)

    def run(windows: Sequence[Window]) -> None:
        for iteration, batch in enumerate(chain.from_iterable(windows), start=1):
            accumulating = iteration % accum_steps != 0
            with runner.no_backward_sync(prepared, enabled=accumulating):
                runner.backward(mean_loss(prepared, batch) / divisor)
            if not accumulating:
                stepping.step()
                stepping.zero_grad()

    return run


class Module(lightning.LightningModule):
    """The least that Trainer needs."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__()
        self.model = model
        self.stepping = optimizer

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return mean_loss(self.model, batch)

    def configure_optimizers(self) -> Any:
        return self.stepping


class Clock(lightning.Callback):
    """CPU seconds between the start and the end of training, without the set-up around it."""

    seconds = 0.0

    def on_train_start(self, *_: Any) -> None:
        self.seconds = -time.process_time()

    def on_train_end(self, *_: Any) -> None:
        self.seconds += time.process_time()


def trainer(model: nn.Module, optimizer: Optimizer, accum_steps: int) -> Run:
    """`Trainer(accumulate_grad_batches=N)`, stripped of logging, checkpoints and progress."""
    module = Module(model, optimizer)

    def run(windows: Sequence[Window]) -> float:
        clock = Clock()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loop = lightning.Trainer(
                accelerator="cpu",
                devices=1,
                max_epochs=1,
                accumulate_grad_batches=accum_steps,
                barebones=True,
                callbacks=[clock],
            )
            loop.fit(module, DataLoader(list(chain.from_iterable(windows)), batch_size=None))
        return clock.seconds

    return run


PEERS: dict[str, Loop] = {"Accelerate": accelerate, "Fabric": fabric, "Lightning Trainer": trainer}

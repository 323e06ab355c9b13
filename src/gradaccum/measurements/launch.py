"""The process group of ranks that torchrun started."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from gradaccum.engine.exchange import lost_ranks
from gradaccum.errors import ConfigError, RankError
from gradaccum.measurements.setup import Setup


@contextmanager
def launched(world_size: int, setup: Setup, *, timeout_s: int) -> Iterator[Setup]:
    """Join the other ranks; gives the setup with the device that they all have.

    Raises:
        ConfigError: not started by torchrun, or with another number of ranks.
        RankError: another rank is gone, or did not come within the timeout.
    """
    _require_launcher(world_size)
    here = replace(setup, device=_device(setup))
    if here.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        stay_on_this_machine()
    _join("cpu:gloo,cuda:nccl" if here.device == "cuda" else "gloo", timeout_s)
    try:
        with lost_ranks():
            yield here
            dist.barrier()  # FSDP2 may abort if a rank leaves while another still waits for it
    finally:
        dist.destroy_process_group()


def _require_launcher(world_size: int) -> None:
    if "RANK" not in os.environ:
        raise ConfigError(
            "the distributed stage was started as one process, and ranks are started by torchrun. Run "
            f"`dvc repro distributed`, or torchrun --standalone --nproc-per-node={world_size} stages/distributed.py."
        )
    if int(os.environ["WORLD_SIZE"]) != world_size:
        raise ConfigError(
            f"torchrun started {os.environ['WORLD_SIZE']} ranks, but distributed.world_size is {world_size}, so the "
            "effective batch would not be what is written down. Give both the same number."
        )


def _device(setup: Setup) -> Literal["cpu", "cuda"]:
    """`auto` is cuda where every rank of this machine has a device of its own."""
    enough = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if setup.device == "cuda" and not enough:
        raise ConfigError(
            f"device = 'cuda' for {os.environ['LOCAL_WORLD_SIZE']} ranks on this machine, which has "
            f"{torch.cuda.device_count()} CUDA devices, and NCCL needs one a rank. Set device to cpu or auto, or "
            "distributed.world_size to the number of devices."
        )
    return "cuda" if setup.device != "cpu" and enough else "cpu"


def stay_on_this_machine() -> None:
    """Let gloo listen on the loopback interface only."""
    loopback = {"lo", "lo0"}.intersection(name for _, name in socket.if_nameindex())
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())


def _join(backend: str, timeout_s: int) -> None:
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except (dist.DistError, RuntimeError) as error:
        raise RankError(
            f"rank {os.environ['RANK']} could not join the others at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} within {timeout_s} s: {str(error).partition(chr(10))[0]} See what the "
            "others say, and that this address and port are free and reachable from every machine."
        ) from error

"""Real ranks for tests: processes, each started when first needed, that run one function after another over gloo."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 180


class FailedOnRankError(AssertionError):
    """A function raised on some rank; the message holds every traceback."""


class Pool:
    """Runs importable functions on the first `world_size` of its processes, each time in a new process group."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.numbers = itertools.count()
        self.processes: list[Any] = []
        self.connections: list[Connection] = []

    def __call__(self, world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """What the function returned on each rank.

        Raises:
            FailedOnRankError: it raised somewhere, or did not end in time.
        """
        self.start(world_size)
        store = self.folder / f"store-{next(self.numbers)}"
        waiting = dict(enumerate(self.connections[:world_size]))
        for connection in waiting.values():
            connection.send((world_size, str(store), function, args, options))
        replies: dict[int, Any] = {}
        while waiting and wait(list(waiting.values()), timeout=TIMEOUT_S):
            for rank in [rank for rank, connection in waiting.items() if connection.poll()]:
                replies[rank] = waiting.pop(rank).recv()
        failed = [f"rank {rank}:\n{reply}" for rank, reply in sorted(replies.items()) if isinstance(reply, str)]
        failed += [f"rank {rank} did not end within {TIMEOUT_S} s" for rank in waiting]
        if waiting:
            self.stop()
        if failed:
            raise FailedOnRankError("\n".join(failed))
        return [torch.load(io.BytesIO(replies[rank]), weights_only=False) for rank in range(world_size)]

    def start(self, world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(len(self.processes), world_size):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, there), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.connections.append(here)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.connections = [], []


def serve(rank: int, connection: Connection) -> None:
    """What each process does: take a function, run it in a process group, reply; until it is killed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    while True:
        try:
            world_size, store, function, args, options = connection.recv()
        except EOFError:
            return
        try:
            reply: Any = io.BytesIO()
            torch.save(in_group(rank, world_size, store, lambda: function(*args, **options)), reply)  # noqa: B023
            connection.send(reply.getvalue())
        except BaseException:  # noqa: BLE001 (the test's process raises it)
            connection.send(traceback.format_exc())


def in_group(rank: int, world_size: int, store: str, call: Callable[[], Any]) -> Any:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    try:
        torch.manual_seed(0)
        result = call()
        dist.barrier()  # or FSDP2 may abort in the destruction
        return result
    finally:
        dist.destroy_process_group()

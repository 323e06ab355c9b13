"""A real tracking server for tests, on PostgreSQL where its binaries are found, which can be frozen as a whole."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from gradaccum.tracking.server import team_server


@contextmanager
def real_server() -> Iterator[str]:
    """Its address; its data lies in a folder that PostgreSQL's user may reach."""
    folder = Path(tempfile.mkdtemp(prefix="gradaccum-server-"))
    folder.chmod(0o755)
    try:
        with team_server(folder, port=free_port()) as address:
            yield address
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def frozen() -> Iterator[None]:
    """SIGSTOP to every process of the servers that this one started."""
    leaders = [child for child in psutil.Process().children() if _serves(child)]
    stopped = [process for leader in leaders for process in (leader, *leader.children(recursive=True))]
    assert stopped
    try:
        for process in stopped:
            process.suspend()
        yield
    finally:
        for process in stopped:
            process.resume()


def _serves(process: psutil.Process) -> bool:
    command = " ".join(process.cmdline())
    return "mlflow server" in command or "bin/postgres" in command


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])

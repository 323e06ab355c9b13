"""PostgreSQL with its data in a folder of ours, for the tracking server."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gradaccum.errors import GradaccumError
from gradaccum.tracking.tether import tethered

_DATABASE = "mlflow"
_PROGRAMS = ("initdb", "postgres", "pg_isready", "createdb")
_SERVICE_USER = "postgres"  # PostgreSQL refuses to run as root
_FAST_SHUTDOWN = signal.SIGINT


class ServerError(GradaccumError):
    """A server that did not come up."""


@contextmanager
def database(folder: Path) -> Iterator[str]:
    """The URI of a database in `folder`: PostgreSQL's where its binaries are found, else sqlite's."""
    binaries = _binaries()
    if binaries is None:
        yield f"sqlite:///{folder / 'mlflow.db'}"
        return
    with tempfile.TemporaryDirectory(prefix="pg-") as socket:  # a short path: a socket's is limited to 107 bytes
        data = folder / "postgres"
        data.mkdir(exist_ok=True)
        _give_to_service_user(folder, data, Path(socket))
        with _postgres(binaries, data, socket):
            yield f"postgresql+psycopg2://{_SERVICE_USER}@/{_DATABASE}?host={socket}"


@contextmanager
def _postgres(binaries: Path, data: Path, socket: str) -> Iterator[None]:
    """PostgreSQL on a unix socket only, in a folder that only its user may enter."""
    if not (data / "PG_VERSION").exists():
        _run(binaries / "initdb", "-D", str(data), "-U", _SERVICE_USER, "--auth=trust", "--no-sync", "-E", "UTF8")
    command = [str(binaries / "postgres"), "-D", str(data), "-k", socket, "-c", "listen_addresses="]
    with log_file(data.parent / "postgres.log") as output:
        command = tethered(_FAST_SHUTDOWN, command)
        server = subprocess.Popen(command, user=_user(), stdout=output, stderr=output, start_new_session=True)
        try:
            _create_database(binaries, socket, server, log=data.parent / "postgres.log")
            yield
        finally:
            server.send_signal(_FAST_SHUTDOWN)
            server.wait(timeout=30)


def _create_database(binaries: Path, socket: str, server: subprocess.Popen[bytes], *, log: Path) -> None:
    at = ["-h", socket, "-U", _SERVICE_USER]
    for _ in range(300):
        if _run(binaries / "pg_isready", "-q", *at, check=False) == 0:
            break
        if server.poll() is not None:
            break
        time.sleep(0.1)
    else:
        raise ServerError(f"PostgreSQL did not answer in 30 s. See {log}.")
    if server.poll() is not None:
        raise ServerError(f"PostgreSQL ended with {server.returncode}. See {log}.")
    _run(binaries / "createdb", *at, _DATABASE, check=False)  # it may be there from the last time


def _run(*command: str | Path, check: bool = True) -> int:
    done = subprocess.run(command, user=_user(), cwd="/", capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise ServerError(f"{Path(command[0]).name} failed: {done.stderr.strip()}")
    return done.returncode


def _user() -> str | None:
    return _SERVICE_USER if os.geteuid() == 0 else None


def _give_to_service_user(folder: Path, *owned: Path) -> None:
    """As root: PostgreSQL runs as its own user, so its folders must be that user's, and on a path it may walk."""
    if _user() is None:
        return
    entry = pwd.getpwnam(_SERVICE_USER)
    closed = [path for path in (folder, *folder.parents) if not path.stat().st_mode & 0o001]
    if closed:
        raise ServerError(
            f"{closed[-1]} is closed to the user {_SERVICE_USER!r}, as which PostgreSQL runs when started by root, so "
            f"it cannot keep its data in {folder}. "
            "Run `make server` as an ordinary user, or open the folder (chmod o+x)."
        )
    for path in owned:
        os.chown(path, entry.pw_uid, entry.pw_gid)


def _binaries() -> Path | None:
    """The folder of PostgreSQL's newest binaries: Debian keeps them out of PATH."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    on_path = [Path(folder) for folder in os.get_exec_path()]
    return next((folder for folder in (*debian, *on_path) if all((folder / name).exists() for name in _PROGRAMS)), None)


@contextmanager
def log_file(log: Path | None) -> Iterator[int | None]:
    """A file descriptor to append to; None where a child is to write where its parent does."""
    if log is None:
        yield None
        return
    with log.open("ab") as file:
        yield file.fileno()

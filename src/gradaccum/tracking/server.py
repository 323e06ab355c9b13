"""`make server`: a team's tracking server for trying it - PostgreSQL, proxied artifacts - on this machine only."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gradaccum.tracking.postgres import ServerError, database, log_file
from gradaccum.tracking.store import MEMORY, locate
from gradaccum.tracking.tether import tethered

# One worker and no job runner: MLflow's defaults take gigabytes and half a minute.
_LEAN = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
_NOISE = "ignore:starlette.middleware.wsgi is deprecated"  # MLflow's own affair, at every start


@contextmanager
def mlflow_server(
    store_uri: str, *, port: int, artifacts: Path | None = None, log: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """MLflow's server on the loopback address, stopped at the end; with `artifacts` it takes them from clients."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    if artifacts:
        command += ["--artifacts-destination", str(artifacts)]
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    environment |= _LEAN | {"MLFLOW_BACKEND_STORE_URI": store_uri}  # not in the command: it may hold a password
    environment["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), _NOISE]))
    with log_file(log) as output:
        server = subprocess.Popen(
            tethered(signal.SIGTERM, command),
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield server
        finally:
            _stop_group(server)


@contextmanager
def team_server(folder: Path, *, port: int) -> Iterator[str]:
    """A server with its data in `folder`: on PostgreSQL where its binaries are found, else on sqlite.

    Yields its address once it answers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    address = f"http://127.0.0.1:{port}"
    with database(folder) as uri:
        log = folder / "server.log"
        with mlflow_server(uri, port=port, artifacts=folder / "artifacts", log=log) as server:
            _wait_for(f"{address}/health", server, log)
            yield address


def _wait_for(address: str, server: subprocess.Popen[bytes], log: Path, *, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise ServerError(f"MLflow's server ended with {server.returncode}. See {log}.")
        try:
            with urllib.request.urlopen(address, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise ServerError(f"MLflow's server did not answer at {address} in {seconds:.0f} s. See {log}.")


def _stop_group(server: subprocess.Popen[bytes]) -> None:
    """The server and its workers, which are in its process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
        except ProcessLookupError:
            break
        try:
            server.wait(timeout=3)
        except subprocess.TimeoutExpired:
            continue
    server.wait()


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the server, say how to use it, and keep it until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m gradaccum.tracking.server", description=__doc__)
    parser.add_argument("--port", type=int, default=5001)
    port = parser.parse_args(arguments).port
    folder = locate().root / MEMORY / "server"
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: stop.set())
    with team_server(folder, port=port) as address:
        print(f"Tracking server: {address}\nData: {folder}\nUse it: export MLFLOW_TRACKING_URI={address}", flush=True)
        stop.wait()


if __name__ == "__main__":
    main()

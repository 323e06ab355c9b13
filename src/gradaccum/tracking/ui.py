"""`make ui`: MLflow's UI over this repository's store, on this machine only."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence

from gradaccum.tracking.server import mlflow_server
from gradaccum.tracking.store import locate


def main(arguments: Sequence[str] | None = None) -> int:
    """Say where the UI is and what it reads, then serve until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m gradaccum.tracking.ui", description=__doc__)
    parser.add_argument("--port", type=int, default=5000)
    port = parser.parse_args(arguments).port
    store = locate()
    if store.uri.startswith("http"):
        print(f"The runs are on a server, which has a UI of its own: {store.label}")
        return 0
    from gradaccum.tracking.client import experiment_id, open_client  # noqa: PLC0415 - mlflow takes a second

    runs = experiment_id(open_client(store), store, store.name)
    # Without the workflow type, MLflow's UI opens on pages about chat models.
    print(f"Pipeline runs: http://127.0.0.1:{port}/#/experiments/{runs}/runs?workflowType=machine_learning")
    print(f"Store: {store.label}\nArtifacts: {store.artifacts}", flush=True)
    with mlflow_server(store.uri, port=port) as server:
        return _wait(server)


def _wait(server: subprocess.Popen[bytes]) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return server.wait()
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())

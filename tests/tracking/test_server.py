"""A team's server: runs and artifacts arrive there, and whatever it does, no measurement is lost or kept waiting."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gradaccum.results.files import write_outcome
from gradaccum.results.outcome import Outcome
from gradaccum.tracking import stage_run as stage_run_module
from gradaccum.tracking.patience import Patience
from gradaccum.tracking.server import team_server
from gradaccum.tracking.stage_run import stage_run
from tests.tracking.dvc_project import Project, make_project
from tests.tracking.faulty_proxy import Proxy, faulty_proxy

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("server")]

PASSWORD = "open-sesame-42"


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of a real one, with its data in a folder that PostgreSQL's user may reach."""
    folder = Path(tempfile.mkdtemp(prefix="gradaccum-server-"))
    folder.chmod(0o755)
    try:
        with team_server(folder, port=free_port()) as address:
            yield address
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def proxy(server: str) -> Iterator[Proxy]:
    with faulty_proxy(server) as proxy:
        yield proxy


@pytest.fixture
def project(tmp_path: Path, request: pytest.FixtureRequest) -> Project:
    """A project that has not run, with an experiment of its own on the server."""
    return replace(make_project(tmp_path / "project"), experiment=request.node.name)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds in place of half a minute."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setattr(stage_run_module, "Patience", lambda store, strict: Patience(store, seconds=3, strict=strict))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.e2e
def test_a_pipeline_tracked_on_a_server_is_read_back_from_there(project: Project, proxy: Proxy) -> None:
    proxy.credentials = f"ann:{PASSWORD}"
    project = replace(project, uri=proxy.address)
    known = {"MLFLOW_TRACKING_USERNAME": "ann", "MLFLOW_TRACKING_PASSWORD": PASSWORD}

    said = project.dvc("repro", **known)

    direct = replace(project, uri=proxy.upstream)
    assert direct.census() == {"equivalence": 1, "throughput": 1, "pipeline": 1}
    (run,) = direct.pipeline_runs()
    curve = direct.client.download_artifacts(run.info.run_id, "accum-curve.json", str(project.root.parent))
    assert Path(curve).read_bytes() == (project.root / "outputs/accum-curve.json").read_bytes()
    assert not (project.root / "mlflow.db").exists()
    assert not (project.root / "mlartifacts").exists()
    again = project.dvc("repro", **known)
    assert "nothing new" in again.stdout
    written = [path.read_bytes() for path in project.root.rglob("*") if path.is_file()]
    logged = [str(run.data) for run in (*direct.stage_runs(), *direct.pipeline_runs())]
    for text in (said.stdout, said.stderr, again.stdout, *logged, *map(repr, written)):
        assert PASSWORD not in text


def test_a_server_that_dies_in_the_middle_costs_warnings_only_and_sync_completes_it(
    project: Project, proxy: Proxy
) -> None:
    project = replace(project, uri=proxy.address)
    proxy.die_at = "mlflow-artifacts"

    done = project.dvc("repro", GRADACCUM_TRACKING="on")

    assert (project.root / "outputs/throughput/metrics.json").exists()
    assert done.stderr.count("MLflow at") == 3
    proxy.die_at, proxy.dead = None, False
    assert project.census() == {"equivalence RUNNING": 1, "pipeline": 0}

    project.sync()

    assert project.census() == {
        "equivalence KILLED": 1,
        "equivalence cached": 1,
        "throughput cached": 1,
        "pipeline": 1,
    }


@pytest.mark.usefixtures("repository", "impatient")
@pytest.mark.parametrize("fault", ["down", "frozen", "slow", "refusing", "dying"])
def test_a_stage_keeps_its_results_and_warns_once_when_the_server_is(
    fault: str, proxy: Proxy, outcome: Outcome, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.dead = fault == "down"
    proxy.die_at = "mlflow-artifacts" if fault == "dying" else None
    proxy.delay_s = 0.9 if fault == "slow" else 0
    proxy.credentials = f"ann:{PASSWORD}" if fault == "refusing" else None
    if fault == "frozen":
        proxy.frozen.set()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.address)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ann")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong-password")

    with stage_run("throughput", {"seed": 7}) as run:
        paths = write_outcome(outcome)
        run.log(outcome, artifacts=paths, figures={"throughput.png": b"figure"})

    assert all(path.exists() for path in paths)
    assert len(caplog.records) == 1
    assert f"MLflow at {proxy.address} could not" in caplog.text
    assert "wrong-password" not in caplog.text

"""A team's server: whatever it does, no measurement is lost or kept waiting, and `sync` completes what is missing."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from gradaccum.results.files import write_outcome
from gradaccum.results.outcome import Outcome
from gradaccum.tracking import journal, stage_run, track
from gradaccum.tracking.client import open_client
from gradaccum.tracking.patience import THREAD, Patience
from gradaccum.tracking.store import locate
from tests.tracking.dvc_project import make_project, wait_until
from tests.tracking.faulty_proxy import Proxy, faulty_proxy
from tests.tracking.locked import PARAMS, locked
from tests.tracking.serving import frozen, real_server

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("server")]

PASSWORD = "wrong-password"


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    with real_server() as address:
        yield address


@pytest.fixture
def proxy(server: str) -> Iterator[Proxy]:
    with faulty_proxy(server) as proxy:
        yield proxy


@pytest.mark.e2e
def test_a_server_that_dies_in_the_middle_costs_warnings_only_and_sync_completes_it(
    tmp_path: Path, proxy: Proxy
) -> None:
    project = replace(make_project(tmp_path / "project"), uri=proxy.address, experiment="dying")
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


@contextmanager
def down(proxy: Proxy) -> Iterator[None]:
    proxy.dead = True
    yield
    proxy.dead = False


@contextmanager
def dying(proxy: Proxy) -> Iterator[None]:
    proxy.die_at = "mlflow-artifacts"
    yield
    proxy.die_at, proxy.dead = None, False


@contextmanager
def slow(proxy: Proxy) -> Iterator[None]:
    proxy.delay_s = 0.3
    yield
    proxy.delay_s = 0


@contextmanager
def refusing(proxy: Proxy) -> Iterator[None]:
    proxy.credentials = "ann:right-password"
    yield
    proxy.credentials = None


def stopped(proxy: Proxy) -> AbstractContextManager[None]:
    return frozen()


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize(
    ("fault", "midway"),
    [(down, False), (down, True), (stopped, False), (stopped, True), (slow, False), (refusing, False), (dying, True)],
)
def test_a_stage_keeps_its_results_and_warns_once_and_sync_completes_it_when_the_server_is(
    fault: Callable[[Proxy], AbstractContextManager[None]],
    midway: bool,
    proxy: Proxy,
    outcome: Outcome,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = {"USERNAME": "ann", "PASSWORD": PASSWORD, "URI": proxy.address}
    for name, value in known.items():
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", value)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", f"{fault.__name__} {midway}")
    patience = Patience(proxy.address)
    monkeypatch.setattr(stage_run, "Patience", lambda store, strict: patience)

    with monkeypatch.context() as hasty, nullcontext() if midway else fault(proxy):
        if not midway:
            _be_hasty(hasty, patience)
        with stage_run.stage_run("throughput", PARAMS) as run, fault(proxy) if midway else nullcontext():
            assert (run.run_id is not None) is midway
            _be_hasty(hasty, patience)
            pipeline = locked(outcome)
            run.log(outcome, artifacts=write_outcome(outcome), figures={"throughput.png": b"figure"})
            _wait_for_calls_left_behind()
        _wait_for_calls_left_behind()

    (warning,) = caplog.records
    assert f"MLflow at {proxy.address} could not" in warning.message
    assert PASSWORD not in caplog.text
    if fault is stopped:
        assert "no answer in time" in warning.message  # cut off by the patience, whatever the call would have waited

    monkeypatch.setattr(track, "read_pipeline", lambda: pipeline)
    monkeypatch.setattr(journal, "is_gone", lambda tags: True)  # as a stage's process is by then
    track.sync()

    client, store = open_client(locate()), locate()
    for name in (store.name, store.stages_name):
        experiment = client.get_experiment_by_name(name)
        assert experiment is not None
        ended = Counter(run.info.status for run in client.search_runs([experiment.experiment_id]))
        assert ended["FINISHED"] == 1
        assert ended.keys() <= {"FINISHED", "KILLED"}


def _be_hasty(patch: pytest.MonkeyPatch, patience: Patience) -> None:
    """Half a second in place of half a minute."""
    patch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    patience.left = 0.5


def _wait_for_calls_left_behind() -> None:
    """A stage's process would have ended; here they would come through once the server answers again."""
    wait_until(lambda: not any(thread.name == THREAD for thread in threading.enumerate()))

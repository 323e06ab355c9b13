"""How a stage's run ends: as what became of its stage, and never at the measurement's cost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mlflow import MlflowClient

from gradaccum.errors import ClaimError, ConfigError
from gradaccum.results.files import read_json, write_outcome
from gradaccum.results.outcome import Outcome
from gradaccum.tracking.patience import TrackingError
from gradaccum.tracking.stage_run import stage_run
from gradaccum.tracking.store import Store
from tests.tracking.dvc_project import SOURCE
from tests.tracking.reading import only_run, runs


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ClaimError("not equal"), "FAILED"),
        (SystemExit(1), "FAILED"),
        (SystemExit("why"), "FAILED"),
        (SystemExit(0), "FINISHED"),
        (SystemExit(), "FINISHED"),
        (KeyboardInterrupt(), "KILLED"),
    ],
)
def test_a_run_ends_as_what_became_of_its_stage(
    client: MlflowClient, store: Store, error: BaseException, status: str
) -> None:
    with pytest.raises(type(error)), stage_run("throughput", {}):
        raise error

    assert only_run(client, store).info.status == status


def test_a_failed_claim_leaves_its_files_in_the_run(client: MlflowClient, store: Store, outcome: Outcome) -> None:
    def stage() -> None:
        with stage_run("throughput", {}) as run:
            run.log(outcome, artifacts=write_outcome(outcome))
            raise ClaimError("throughput fell")

    with pytest.raises(ClaimError):
        stage()

    logged = only_run(client, store)
    assert logged.info.status == "FAILED"
    assert read_json(Path(client.download_artifacts(logged.info.run_id, "metrics.json")))["flattens"] is True


SLEEPING_STAGE = """
import sys, time
from gradaccum.tracking.stage_run import stage_run
with stage_run("throughput", {}):
    print("measuring", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_stopped_stage_ends_its_run_as_killed(
    client: MlflowClient, store: Store, number: signal.Signals, code: int
) -> None:
    with _measuring() as stage:
        stage.send_signal(number)

        assert stage.wait(timeout=30) == code
    assert only_run(client, store).info.status == "KILLED"


def test_the_next_stage_ends_the_run_of_one_that_could_not(client: MlflowClient, store: Store) -> None:
    with _measuring() as killed, _measuring() as living:
        killed.kill()
        assert [run.info.status for run in runs(client, store)] == ["RUNNING", "RUNNING"]

        with stage_run("ablation", {}):
            pass

        status = {run.data.tags["process.pid"]: run.info.status for run in runs(client, store)}
        assert status[str(killed.pid)] == "KILLED"
        assert status[str(living.pid)] == "RUNNING"


def test_a_running_run_of_another_machine_is_left_alone(client: MlflowClient, store: Store) -> None:
    with stage_run("throughput", {}) as run:
        client.set_tag(run.run_id, "process.host", "another-machine")
        client.set_tag(run.run_id, "process.pid", "1")
        with stage_run("ablation", {}):
            pass
        assert client.get_run(run.run_id).info.status == "RUNNING"


def test_off_imports_nothing_and_logs_nothing(repository: Path) -> None:
    script = (
        "import sys\nfrom gradaccum.tracking.stage_run import stage_run\n"
        "with stage_run('throughput', {}) as run:\n    run.log(None)\n"
        "assert run.run_id is None\n"
        "print([name for name in ('mlflow', 'torch') if name in sys.modules])"
    )
    done = _python(script, GRADACCUM_TRACKING="off")

    assert done.stdout.strip() == "[]"
    assert not (repository / ".track").exists()


def test_importing_tracking_imports_neither_mlflow_nor_torch(repository: Path) -> None:
    script = "import sys, gradaccum.tracking.stage_run\nprint([n for n in ('mlflow', 'torch') if n in sys.modules])"

    assert _python(script).stdout.strip() == "[]"


def test_children_of_a_stage_do_not_inherit_its_run(client: MlflowClient, store: Store) -> None:
    with stage_run("throughput", {}):
        assert "MLFLOW_RUN_ID" not in os.environ


def test_an_unknown_mode_is_refused(monkeypatch: pytest.MonkeyPatch, repository: Path) -> None:
    monkeypatch.setenv("GRADACCUM_TRACKING", "yes")
    with pytest.raises(ConfigError, match="'yes' is unknown\\. Set it to one of off, on, strict"), stage_run("x", {}):
        pass


def test_a_store_that_fails_costs_one_warning_and_no_measurement(
    repository: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, outcome: Outcome
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:pa55word@127.0.0.1:9")
    with stage_run("throughput", {}) as run:
        paths = write_outcome(outcome)
        run.log(outcome, artifacts=paths)

    assert all(path.exists() for path in paths)
    (warning,) = caplog.records
    assert "http://***@127.0.0.1:9 could not open a run" in warning.message
    assert "pa55word" not in caplog.text
    assert "gradaccum sync" in warning.message


@pytest.mark.usefixtures("repository")
def test_strict_makes_a_store_that_fails_an_error_before_anything_is_measured_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("GRADACCUM_TRACKING", "strict")
    with pytest.raises(TrackingError, match=r"could not open a run.*Nothing was measured") as failed:
        stage_run("throughput", {}).__enter__()
    assert "kept as files" not in str(failed.value)


def test_strict_says_that_results_are_kept_where_the_store_fails_after_they_were_measured(
    client: MlflowClient, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured() -> None:
        with stage_run("throughput", {}) as run:
            paths = write_outcome(outcome)
            monkeypatch.setattr(MlflowClient, "log_batch", None)
            run.log(outcome, artifacts=paths)

    monkeypatch.setenv("GRADACCUM_TRACKING", "strict")
    with pytest.raises(TrackingError, match=r"could not take the results.*The results are kept as files"):
        measured()


def _environment(**changes: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(SOURCE)} | changes


def _python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=_environment(**environment))


@contextmanager
def _measuring() -> Iterator[subprocess.Popen[str]]:
    """The process of a stage that has said that it measures."""
    command = [sys.executable, "-c", SLEEPING_STAGE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment()) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "measuring\n"
        try:
            yield child
        finally:
            child.kill()

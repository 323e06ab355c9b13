"""Where the store is, for every folder a stage may run in."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from gradaccum.errors import ConfigError
from gradaccum.tracking import client as client_module
from gradaccum.tracking.client import experiment_id, on_network, open_client
from gradaccum.tracking.stage_run import stage_run
from gradaccum.tracking.store import Store, locate, main_root, redact


@pytest.mark.parametrize(
    ("working_folder", "dvc_root"),
    [
        (".", None),
        ("stages/deep", None),
        (".", "."),
        (".dvc/tmp/exps/tmp1a2b", "."),
        (".dvc/tmp/exps/tmp1a2b", None),
        (".dvc/tmp/exps/tmp1a2b", "../another"),
        ("stages", "../another"),
    ],
)
def test_the_main_repository_is_found_from_every_folder_that_dvc_runs_a_stage_in(
    tmp_path: Path, working_folder: str, dvc_root: str | None
) -> None:
    root = tmp_path / "repository"
    cwd = root / working_folder
    cwd.mkdir(parents=True)
    (root / ".dvc").mkdir(exist_ok=True)
    environment = {"DVC_ROOT": str(root / dvc_root)} if dvc_root else {}

    assert main_root(cwd.resolve(), environment) == root


def test_a_project_in_a_temporary_experiment_folder_of_another_is_not_taken_for_it(tmp_path: Path) -> None:
    assert main_root(tmp_path / "alone", {"DVC_ROOT": str(tmp_path / "other")}) == tmp_path / "alone"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "sqlite:///{root}/mlflow.db"),
        ("sqlite:///mlflow.db", "sqlite:///{root}/mlflow.db"),
        ("sqlite:///runs/own.db?timeout=5", "sqlite:///{root}/runs/own.db?timeout=5"),
        ("sqlite:////elsewhere/own.db", "sqlite:////elsewhere/own.db"),
        ("sqlite:///:memory:", "sqlite:///:memory:"),
        ("http://localhost:5000", "http://localhost:5000"),
    ],
)
def test_a_relative_database_lies_in_the_main_repository(tmp_path: Path, given: str, expected: str) -> None:
    folder = tmp_path / ".dvc" / "tmp" / "exps" / "tmp1"

    assert locate(folder, {"MLFLOW_TRACKING_URI": given}).uri == expected.format(root=tmp_path)


def test_a_uri_of_spaces_is_none_and_one_without_a_file_is_refused(tmp_path: Path) -> None:
    assert locate(tmp_path, {"MLFLOW_TRACKING_URI": "  "}) == locate(tmp_path, {})
    for uri in ("sqlite:///", "sqlite:///?timeout=3"):
        with pytest.raises(ConfigError, match="names no file"):
            locate(tmp_path, {"MLFLOW_TRACKING_URI": uri})


def test_a_database_that_is_corrupt_is_to_be_moved_away(repository: Path, caplog: pytest.LogCaptureFixture) -> None:
    (repository / "mlflow.db").write_bytes(b"no database" * 1000)
    with stage_run("throughput", {}):
        pass
    assert "move that file away, then `gradaccum sync --all`" in caplog.text


def test_experiments_take_the_name_that_the_environment_gives(tmp_path: Path) -> None:
    plain = locate(tmp_path, {})
    named = locate(tmp_path, {"MLFLOW_EXPERIMENT_NAME": "mine"})

    assert (plain.name, plain.stages_name) == ("gradient-accumulation", "gradient-accumulation-stages")
    assert (named.name, named.stages_name) == ("mine", "mine-stages")


def test_a_server_decides_where_its_artifacts_lie(tmp_path: Path) -> None:
    assert locate(tmp_path, {"MLFLOW_TRACKING_URI": "http://localhost:1"}).artifacts is None
    assert locate(tmp_path, {}).artifacts == str(tmp_path / "mlartifacts")


def test_credentials_are_taken_out_of_what_people_read() -> None:
    secrets = {"MLFLOW_TRACKING_PASSWORD": "hunter2", "MLFLOW_TRACKING_TOKEN": ""}

    assert (
        redact("http://ann:pw@host/x and postgresql://bob:q@db/y", {}) == "http://***@host/x and postgresql://***@db/y"
    )
    assert redact("401 for hunter2", secrets) == "401 for ***"


def test_a_new_database_is_in_wal_mode_and_its_default_artifacts_lie_in_the_main_repository(
    store: Store, repository: Path
) -> None:
    client = open_client(store)
    made = client.get_experiment(experiment_id(client, store, store.name))

    assert sqlite3.connect(repository / "mlflow.db").execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert made.artifact_location == str(repository / "mlartifacts")


def test_a_deleted_experiment_is_restored(store: Store) -> None:
    client = open_client(store)
    first = experiment_id(client, store, store.name)
    client.delete_experiment(first)

    assert experiment_id(client, store, store.name) == first
    assert client.get_experiment(first).lifecycle_stage == "active"


@pytest.mark.parametrize(("kind", "expected"), [("nfs4", True), ("fuse.sshfs", True), ("ext4", False)])
def test_a_network_file_system_is_told_by_the_deepest_mount(
    monkeypatch: pytest.MonkeyPatch, kind: str, expected: bool
) -> None:
    mounts = [("/", "overlay"), ("/team", kind), ("/other", "nfs")]
    parts = [psutil._ntuples.sdiskpart("none", point, fstype, "") for point, fstype in mounts]
    monkeypatch.setattr(client_module.psutil, "disk_partitions", lambda **_: parts)

    assert on_network(Path("/team/project/mlflow.db")) is expected


def test_a_moved_repository_keeps_its_runs_and_opens_their_artifacts(tmp_path: Path, store: Store) -> None:
    client = open_client(store)
    run = client.create_run(experiment_id(client, store, store.stages_name)).info.run_id
    client.log_text(run, "seen", "note.txt")
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in (tmp_path / ".dvc", tmp_path / "mlartifacts", *tmp_path.glob("mlflow.db*")):
        path.rename(moved / path.name)

    reopened = open_client(locate(moved))
    later = reopened.create_run(experiment_id(reopened, locate(moved), store.stages_name))

    assert Path(reopened.download_artifacts(run, "note.txt")).read_text() == "seen"
    assert later.info.artifact_uri.startswith(str(moved))


def test_a_database_whose_making_was_cut_short_is_not_put_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "SqlAlchemyStore", lambda uri, artifacts: _half_made(Path(uri[10:])))
    (tmp_path / ".dvc").mkdir()
    with pytest.raises(OSError, match="disk is full"):
        open_client(locate(tmp_path, {}))

    assert not (tmp_path / "mlflow.db").exists()


def _half_made(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE experiments (half INTEGER)")
    raise OSError("disk is full")


LOGGING_PROCESS = """
from pathlib import Path
from gradaccum.results.curve import Curve
from gradaccum.results.outcome import Outcome, StepSeries
from gradaccum.tracking.stage_run import stage_run
series = [StepSeries(f"s{i}", range(40), [float(i)] * 40) for i in range(5)]
with stage_run("throughput", {"seed": 1}) as run:
    for _ in range(10):
        run.log(Outcome({"a": 1}, Curve("throughput", "accum_steps"), [], series=series))
"""


def test_four_processes_make_the_store_and_log_at_once_and_nothing_is_lost(tmp_path: Path) -> None:
    (tmp_path / ".dvc").mkdir()
    with suppress(OSError):
        _half_made(tmp_path / "mlflow.db.new")  # what a killed one leaves
    command = [sys.executable, "-c", LOGGING_PROCESS]
    children = [
        subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=_strict()) for _ in range(4)
    ]
    said = [child.communicate(timeout=120)[1] for child in children]

    assert [child.returncode for child in children] == [0, 0, 0, 0], said
    assert not any("locked" in text for text in said)
    store = locate(tmp_path, {})
    client = open_client(store)
    runs = client.search_runs([experiment_id(client, store, store.stages_name)])
    assert [run.info.status for run in runs] == ["FINISHED"] * 4
    assert {len(client.get_metric_history(run.info.run_id, "s4")) for run in runs} == {400}


def _strict() -> dict[str, str]:
    import os

    return os.environ | {"GRADACCUM_TRACKING": "strict", "PYTHONPATH": str(Path(client_module.__file__).parents[2])}

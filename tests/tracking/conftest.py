"""A repository with a store of its own, made once and copied."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from gradaccum.results.curve import Curve
from gradaccum.results.outcome import Outcome, StepSeries
from gradaccum.tracking.client import open_client
from gradaccum.tracking.store import Store, locate
from tests.tracking.dvc_project import Project, make_project

FOREIGN = ("DVC_ROOT", "DVC_EXP_NAME", "DVC_EXP_BASELINE_REV", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*FOREIGN, "GRADACCUM_TRACKING"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template")
    (root / ".dvc").mkdir()
    open_client(locate(root, {}))
    return root / "mlflow.db"


@pytest.fixture
def repository(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder: a repository whose store exists and is empty."""
    (tmp_path / ".dvc").mkdir()
    shutil.copy(empty_database, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def store(repository: Path) -> Store:
    return locate(repository)


@pytest.fixture
def client(store: Store) -> MlflowClient:
    return open_client(store)


@pytest.fixture
def outcome() -> Outcome:
    """Three points of a sweep, out of order, and a loss that diverged."""
    points = [
        {"series": "sgd", "effective_batch": 4 * n, "accum_steps": n, "micro_batch": 4, "world_size": 1}
        | {"samples_per_sec": 100.0 * n, "kink": n == 2, "note": "text"}
        for n in (4, 1, 2)
    ]
    return Outcome(
        metrics={"peak_samples_per_sec": 400.0, "flattens": True, "flattens_at_effective_batch": None},
        curve=Curve("throughput", "effective_batch", tuple(points)),
        summary=[],
        series=[StepSeries("naive/loss N=2", (1, 2, 3), (2.5, None, None))],
    )


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project after its first `dvc repro`, all committed."""
    project = make_project(tmp_path_factory.mktemp("template") / "project")
    project.dvc("repro")
    project.commit("Run")
    return project


@pytest.fixture
def project(template: Project, tmp_path: Path) -> Project:
    shutil.copytree(template.root, tmp_path / "project", symlinks=True)
    return Project(tmp_path / "project")

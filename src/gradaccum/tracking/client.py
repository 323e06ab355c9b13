"""An MLflow client on the store, made ready by the first process that needs it. Importing this imports mlflow."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from pathlib import Path

import psutil
from filelock import FileLock
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from gradaccum.tracking.store import Store

_NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "9p", "fuse.sshfs", "lustre", "ceph", "glusterfs", "afs")
_NOISY = ("mlflow", "alembic", "urllib3.connectionpool")


def open_client(store: Store) -> MlflowClient:
    """A client on the store; a sqlite one is created or moved along first, by one process at a time."""
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    if store.database is None:
        return MlflowClient(tracking_uri=store.uri)
    store.database.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{store.database}.lock"):  # MLflow's first migration breaks when several processes run it
        _create(store, store.database)
        _follow_the_repository(store, store.database)
        return MlflowClient(tracking_uri=store.uri)


def experiment_id(client: MlflowClient, store: Store, name: str) -> str:
    """The experiment's id, made or restored where need be."""
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, artifact_location=store.artifacts))
        except MlflowException:  # another process was faster
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


def _create(store: Store, database: Path) -> None:
    """Make the database aside, then put it in its place: a half-made one, of a full disk or a kill, never mends."""
    if database.exists() and database.stat().st_size:
        return
    unfinished = database.with_name(f"{database.name}.new")
    for leftover in database.parent.glob(f"{unfinished.name}*"):
        leftover.unlink()
    made = SqlAlchemyStore(f"sqlite:///{unfinished}", store.artifacts)  # type: ignore[no-untyped-call]
    made.engine.dispose()
    if not on_network(database):
        with closing(sqlite3.connect(unfinished)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
    unfinished.replace(database)


def on_network(path: Path) -> bool:
    """Whether the file lies on a network file system, where sqlite's write-ahead log breaks."""
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    deepest = max(mounts, key=lambda part: len(part.mountpoint), default=None)
    return deepest is not None and deepest.fstype.startswith(_NETWORK_FILE_SYSTEMS)


def _follow_the_repository(store: Store, database: Path) -> None:
    """After the repository was moved or copied, its own database names artifacts where they were: name them here."""
    if database.parent != store.root or store.artifacts is None:
        return
    query = (
        "SELECT DISTINCT artifact_location FROM experiments"
        " WHERE name IN (?, ?) AND artifact_location <> ? AND artifact_location LIKE '%/mlartifacts'"
    )
    with closing(sqlite3.connect(database, timeout=20)) as connection, connection:
        stale = connection.execute(query, (store.name, store.stages_name, store.artifacts)).fetchall()
        for (old,) in stale:
            connection.execute(
                "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?) WHERE substr(artifact_uri, 1, ?) = ?",
                (store.artifacts, len(old) + 1, len(old) + 1, f"{old}/"),
            )
            connection.execute(
                "UPDATE experiments SET artifact_location = ? WHERE artifact_location = ?", (store.artifacts, old)
            )

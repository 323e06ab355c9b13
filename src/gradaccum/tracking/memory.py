"""What tracking remembers in the git-ignored folder .track: no credentials, nothing that cannot be lost."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gradaccum.results.files import ResultFileError, read_json, write_json
from gradaccum.tracking.records import digest
from gradaccum.tracking.store import MEMORY, Store

_RUNS = MEMORY / "runs"
_PUBLISHED = MEMORY / "published.json"

RESULTS = ("accum-curve.json", "metrics.json")


def remember_run(stage: str, run_id: str, *, store: Store, results: str) -> None:
    """A live run just made in this working folder, so that `track` can claim it, or drop it as a repetition.

    Each has a file of its own, so that two processes may remember at once.
    """
    write_json(_RUNS / stage / f"{run_id}.json", {"run_id": run_id, "store": store.label, "results": results})


def recall_runs(stage: str, *, store: Store, results: str) -> set[str]:
    """The ids of the stage's runs that this working folder made since `forget_runs`, whose results were these."""
    found = [memory for path in _remembered(stage) if (memory := _memory(path))]
    same = [memory for memory in found if (memory.get("store"), memory.get("results")) == (store.label, results)]
    return {str(memory["run_id"]) for memory in same}


def has_unclaimed_runs() -> bool:
    """Whether a stage ran in this working folder since `forget_runs`."""
    return bool(_remembered("*"))


def forget_runs() -> None:
    for path in _remembered("*"):
        path.unlink(missing_ok=True)


def _remembered(stage: str) -> list[Path]:
    return list(_RUNS.glob(f"{stage}/*.json"))


def _memory(path: Path) -> Mapping[str, Any]:
    """What a file of this folder holds; nothing where it is gone or broken, as nothing here is needed."""
    try:
        return read_json(path)
    except ResultFileError:
        return {}


def remember_publication(store: Store, state: str, names: Sequence[str]) -> None:
    """The pipeline state last published from anywhere in this repository."""
    data = {"store": store.label, "experiment": store.name, "state": state, "names": list(names)}
    write_json(store.root / _PUBLISHED, data)


def is_published(store: Store, state: str, name: str) -> bool:
    """Whether the state, under this experiment's name, is what was last published, and the store still has it.

    A server is believed to have kept it; a database that was deleted, or emptied, is seen.
    """
    memory = _memory(store.root / _PUBLISHED)
    same = (memory.get("store"), memory.get("experiment"), memory.get("state")) == (store.label, store.name, state)
    named = not name or name in memory.get("names", [])
    return same and named and (store.database is None or _holds(store.database, store.name, state))


def _holds(database: Path, experiment: str, state: str) -> bool:
    query = (
        "SELECT 1 FROM tags JOIN runs USING (run_uuid) JOIN experiments USING (experiment_id)"
        " WHERE tags.key = 'state' AND tags.value = ? AND runs.lifecycle_stage = 'active'"
        " AND runs.status = 'FINISHED' AND experiments.name = ? AND experiments.lifecycle_stage = 'active'"
    )
    try:
        with closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True, timeout=5)) as connection:
            return connection.execute(query, (state, experiment)).fetchone() is not None
    except sqlite3.Error:
        return False


def results_digest(md5s: Mapping[str, str]) -> str:
    """One digest of a stage's result files, from their md5 by name, as dvc.lock has them."""
    return digest({name: md5s.get(name) for name in RESULTS})


def md5(path: Path) -> str:
    """The file's md5 as DVC computes it."""
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()

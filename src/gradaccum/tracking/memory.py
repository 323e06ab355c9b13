"""What tracking remembers in the git-ignored folder .track: no credentials, nothing that cannot be lost."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from gradaccum.results.files import ResultFileError, read_json, write_json
from gradaccum.tracking.records import digest
from gradaccum.tracking.store import MEMORY, Store

_RUNS = MEMORY / "runs"
_PUBLISHED = MEMORY / "published.json"

RESULTS = ("accum-curve.json", "metrics.json")


def remember_run(stage: str, run_id: str, *, store: Store, results: str) -> None:
    """The live run just made in this working folder, so that `track` can claim it."""
    write_json(_RUNS / f"{stage}.json", {"run_id": run_id, "store": store.label, "results": results})


def recall_run(stage: str, *, store: Store, results: str) -> str | None:
    """The id of the run that this working folder last made of the stage, if its results were these."""
    try:
        memory = read_json(_RUNS / f"{stage}.json")
    except ResultFileError:
        return None
    same = memory.get("store") == store.label and memory.get("results") == results
    return str(memory["run_id"]) if same else None


def has_unclaimed_runs() -> bool:
    """Whether a stage ran in this working folder since `forget_runs`."""
    return any(_RUNS.glob("*.json"))


def forget_runs() -> None:
    for path in _RUNS.glob("*.json"):
        path.unlink(missing_ok=True)


def remember_publication(store: Store, state: str, names: Sequence[str]) -> None:
    """The pipeline state last published from anywhere in this repository."""
    data = {"store": store.label, "experiment": store.name, "state": state, "names": list(names)}
    write_json(store.root / _PUBLISHED, data)


def is_published(store: Store, state: str, name: str) -> bool:
    """Whether the state, under this experiment's name, is what was last published, and the store still has it.

    A server is believed to have kept it; a database that was deleted, or emptied, is seen.
    """
    try:
        memory = read_json(store.root / _PUBLISHED)
    except ResultFileError:
        return False
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

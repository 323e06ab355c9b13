"""What tracking remembers in the git-ignored folder .track: no credentials, nothing that cannot be lost."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from gradaccum.results.files import ResultFileError, read_json, write_json
from gradaccum.tracking.records import digest
from gradaccum.tracking.store import MEMORY, Store

RESULTS = ("accum-curve.json", "metrics.json")


def remember_run(stage: str, run_id: str, *, store: Store, results: str) -> None:
    """The live run just made in this working folder, so that `track` can claim it."""
    write_json(MEMORY / f"{stage}.json", {"run_id": run_id, "store": store.label, "results": results})


def recall_run(stage: str, *, store: Store, results: str) -> str | None:
    """The id of the run that this working folder last made of the stage, if its results were these."""
    try:
        memory = read_json(MEMORY / f"{stage}.json")
    except ResultFileError:
        return None
    same = memory.get("store") == store.label and memory.get("results") == results
    return str(memory["run_id"]) if same else None


def results_digest(md5s: Mapping[str, str]) -> str:
    """One digest of a stage's result files, from their md5 by name, as dvc.lock has them."""
    return digest({name: md5s.get(name) for name in RESULTS})


def md5(path: Path) -> str:
    """The file's md5 as DVC computes it."""
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()

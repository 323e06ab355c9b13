"""Pipeline states that the working folder no longer has: those that git keeps in commits and DVC's experiments."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradaccum.errors import ConfigError
from gradaccum.tracking.lockfile import LOCK, PARAMS, PIPELINE, Pipeline, read_pipeline
from gradaccum.tracking.provenance import Origin

NOT_CACHED, NOT_WHOLE = "not in DVC's cache", "no whole state, as a stage was run alone"

_TIMES = "%H %ct"


@dataclass(frozen=True)
class LeftOut:
    """Why a past state has no run: a few words that many states share, and what it is with this one."""

    kind: str
    why: str


@dataclass(frozen=True)
class Cache:
    """DVC's cache of the repository, wherever its configuration puts it, and whether a remote may hold more."""

    objects: Any
    has_remote: bool

    def copy(self, md5: str, path: Path) -> bool:
        """Copy the object, or every file of one that is a folder; whether all was there."""
        source = Path(self.objects.oid_to_path(md5))
        if not md5 or not source.exists():
            return False
        if md5.endswith(".dir"):
            entries = json.loads(source.read_text())
            return all(self.copy(entry["md5"], path / entry["relpath"]) for entry in entries)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
        return True


def past(folder: Path) -> list[Origin]:
    """Every commit and experiment that holds a pipeline's lock, oldest first; of commits with equal ones, the first."""
    if not (folder / PIPELINE).exists():
        raise ConfigError(f"{PIPELINE} is missing from {folder}. Run this in the project's root.")
    every = sorted([*_commits(folder), *_experiments(folder)], key=lambda origin: origin.committed_ms or 0)
    names = [f"{origin.commit}:./{file}" for origin in every for file in (LOCK, PIPELINE)]
    blobs = _git(folder, "cat-file", "--batch-check=%(objectname)", given="\n".join(names)).decode().splitlines()
    first: dict[tuple[str, str, str], Origin] = {}
    for origin, lock, pipeline in zip(every, blobs[::2], blobs[1::2], strict=True):
        if not any(blob.endswith(" missing") for blob in (lock, pipeline)):
            first.setdefault((lock, pipeline, origin.experiment), origin)
    return list(first.values())


@contextmanager
def laid_out(folder: Path, origin: Origin) -> Iterator[Pipeline]:
    """Work in a folder that holds what git has of the commit's state; DVC's cache may hold more of it."""
    with tempfile.TemporaryDirectory(prefix="gradaccum-") as temporary, chdir(temporary):
        for file in (LOCK, PIPELINE, Path(PARAMS)):
            _from_git(folder, origin, file)
        pipeline = read_pipeline()
        for stage in pipeline.counted:
            for path in stage.outs:
                _from_git(folder, origin, Path(path))
        yield pipeline


def hindrance(cache: Cache, pipeline: Pipeline) -> LeftOut | None:
    """Copy what the folder lacks of the results from the cache; why there is no whole state even so, if that is so."""
    if stale := pipeline.stale():
        were = "was" if len(stale) == 1 else "were"
        why = f"{', '.join(stale)} {were} run on older results than those beside"
        return LeftOut(NOT_WHOLE, why)
    lacking = [
        path
        for stage in pipeline.counted
        for path, md5 in stage.outs.items()
        if not Path(path).exists() and not cache.copy(md5, Path(path))
    ]
    return LeftOut(NOT_CACHED, f"it lacks {', '.join(lacking)}") if lacking else None


def open_cache(root: Path) -> Cache:
    from dvc.exceptions import NotDvcRepoError  # noqa: PLC0415 - takes a second, and only the past needs it
    from dvc.repo import Repo  # noqa: PLC0415 - likewise

    try:
        repo = Repo(str(root))
    except NotDvcRepoError as error:
        raise ConfigError(f"{root} is no DVC repository. Run this in the project's root.") from error
    return Cache(repo.cache.local, has_remote=bool(repo.config["remote"]))


def _commits(folder: Path) -> list[Origin]:
    """Those of all branches and tags."""
    everywhere = ("--branches", "--tags", "--remotes", "HEAD")
    return _origins(_git(folder, "log", "--reverse", "--topo-order", f"--format={_TIMES}", *everywhere))


def _experiments(folder: Path) -> list[Origin]:
    """DVC keeps an experiment under refs/exps/<2 digits of its baseline>/<the others>/<name>."""
    refs = _git(folder, "for-each-ref", "--format=%(refname)", "refs/exps").decode().split()
    parts = [ref.split("/") for ref in refs]
    named = [(f"{part[2]}{part[3]}", part[4], "/".join(part)) for part in parts if len(part) == 5 and len(part[2]) == 2]
    return [
        Origin(found.commit, dirty=False, experiment=name, baseline=baseline, committed_ms=found.committed_ms)
        for baseline, name, ref in named
        for found in _origins(_git(folder, "log", "-1", f"--format={_TIMES}", ref))
    ]


def _origins(log: bytes) -> list[Origin]:
    pairs = [line.split() for line in log.decode().splitlines()]
    return [Origin(commit, dirty=False, committed_ms=int(seconds) * 1000) for commit, seconds in pairs]


def _from_git(folder: Path, origin: Origin, path: Path) -> None:
    """The file as the commit has it, if it has it."""
    found = _run(folder, ["cat-file", "blob", f"{origin.commit}:./{path}"])
    if found.returncode == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(found.stdout)


def _git(folder: Path, *arguments: str, given: str = "") -> bytes:
    done = _run(folder, ["-c", "log.showSignature=false", *arguments], given)
    if done.returncode:
        raise ConfigError(
            f"git {arguments[0]} failed in {folder}: {done.stderr.decode().strip()}. "
            "Past states lie in git: run `gradaccum sync`, without --all, where there is none."
        )
    return done.stdout


def _run(folder: Path, arguments: Sequence[str], given: str = "") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=folder, input=given.encode(), capture_output=True, check=False)

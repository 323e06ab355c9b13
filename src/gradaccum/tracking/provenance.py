"""Where results come from - experiment, commit, process - as a run's tags say it."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from gradaccum.tracking.store import Store

# Changed by the pipeline itself while it runs, so no sign of an edited working tree.
_PRODUCED = (":(exclude,top)outputs", ":(exclude,top)dvc.lock")


@dataclass(frozen=True)
class Origin:
    """The commit and the DVC experiment that results belong to.

    Attributes:
        committed_ms: since 1970, for results of the past, which lie in a commit; None for those of the working folder.
    """

    commit: str
    dirty: bool
    experiment: str = ""
    baseline: str = ""
    committed_ms: int | None = None

    @property
    def past(self) -> bool:
        """Whether these are no longer the results in the working folder."""
        return self.committed_ms is not None

    def tags(self, store: Store) -> dict[str, str]:
        """Tags that tell which experiment, commit and process a run comes from."""
        tags = {
            "dvc.exp_name": self.experiment,
            "dvc.baseline": self.baseline,
            "git.commit": self.commit,
            "git.dirty": str(self.dirty).lower() if self.commit else "",
            "mlflow.source.git.commit": self.commit,
            "mlflow.source.name": _script(),
            "mlflow.source.type": "LOCAL",
            "mlflow.user": _user(),
            **process_tags(store),
        }
        return {name: value for name, value in tags.items() if value}


def here() -> Origin:
    """The working folder's, in the experiment that DVC runs there, if any."""
    commit, dirty = _commit()
    experiment, baseline = (os.environ.get(f"DVC_EXP_{name}", "") for name in ("NAME", "BASELINE_REV"))
    return Origin(commit, dirty, experiment=experiment, baseline=baseline)


def process_tags(store: Store) -> dict[str, str]:
    """Tags by which a later process can tell that this one is gone."""
    return {
        "repository": str(store.root),
        "process.host": socket.gethostname(),
        "process.pid": str(os.getpid()),
        "process.started": f"{psutil.Process().create_time():.2f}",
    }


def is_gone(tags: Mapping[str, str]) -> bool:
    """Whether the process that the tags name, on this host, has ended."""
    try:
        process = psutil.Process(int(tags["process.pid"]))
        # A minute: setting the system's clock moves the time at which a process is said to have started.
        same = abs(process.create_time() - float(tags["process.started"])) < 60
        return not same or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def short_name(tags: Mapping[str, str], digest: str) -> str:
    """What people call a state: its experiment, or its commit and, as many states share one, four of its digest."""
    return tags.get("dvc.exp_name") or f"{tags.get('git.commit', 'uncommitted')[:7]}-{digest[:4]}"


def _commit() -> tuple[str, bool]:
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", *_PRODUCED)
    return commit, bool(changes)


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _script() -> str:
    script = Path(sys.argv[0]).absolute()
    return str(script.relative_to(Path.cwd())) if script.is_relative_to(Path.cwd()) else script.name


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""

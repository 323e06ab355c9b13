"""Where the MLflow store is: beside the main repository, from whatever folder a stage runs in."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gradaccum.errors import ConfigError

DEFAULT_NAME = "gradient-accumulation"
MEMORY = Path(".track")

_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_SECRETS = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")


@dataclass(frozen=True)
class Store:
    """One MLflow tracking store, as this repository uses it.

    Attributes:
        root: folder of the main repository.
        uri: MLflow's tracking URI; may hold credentials, so print `label` instead.
        name: the experiment of pipeline runs.
    """

    root: Path
    uri: str
    name: str

    @property
    def stages_name(self) -> str:
        """The experiment of stage runs."""
        return f"{self.name}-stages"

    @property
    def label(self) -> str:
        """The URI without its credentials, for people and files."""
        return redact(self.uri)

    @property
    def database(self) -> Path | None:
        """The sqlite file, if the store is one."""
        location = self.uri.removeprefix("sqlite:///").partition("?")[0]
        return Path(location) if self.uri.startswith("sqlite:///") and location != ":memory:" else None

    @property
    def artifacts(self) -> str | None:
        """Where this side puts artifacts: None where a server decides."""
        return str(self.root / "mlartifacts") if self.uri.startswith(_DATABASES) else None


def locate(cwd: Path | None = None, env: Mapping[str, str] = os.environ) -> Store:
    """The store of the repository that `cwd` belongs to, under MLflow's own environment variables."""
    root = main_root((cwd or Path.cwd()).resolve(), env)
    uri = env.get("MLFLOW_TRACKING_URI", "").strip() or f"sqlite:///{root / 'mlflow.db'}"
    return Store(root=root, uri=_absolute(uri, root), name=env.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_NAME)


def main_root(cwd: Path, env: Mapping[str, str] = os.environ) -> Path:
    """The main repository's root, also from the folders in which DVC runs queued and temporary experiments.

    There DVC_ROOT names the main repository. A DVC_ROOT that the working folder does not lie under belongs to another
    pipeline, whose stage started this one.
    """
    named = env.get("DVC_ROOT")
    if named and cwd.is_relative_to(Path(named).resolve()):
        return Path(named).resolve()
    if ".dvc" in cwd.parts:
        return Path(*cwd.parts[: cwd.parts.index(".dvc")])
    return next((folder for folder in (cwd, *cwd.parents) if (folder / ".dvc").is_dir()), cwd)


def redact(text: str, env: Mapping[str, str] = os.environ) -> str:
    """The text without credentials: those of URIs in it, and those that MLflow reads from the environment."""
    for name in _SECRETS:
        if env.get(name):
            text = text.replace(env[name], "***")
    return _USERINFO.sub("***@", text)


def _absolute(uri: str, root: Path) -> str:
    """A relative sqlite URI, made absolute against the main repository.

    Raises:
        ConfigError: it names no file.
    """
    if not uri.startswith("sqlite:///") or uri.startswith("sqlite:///:memory:"):
        return uri
    if not uri.removeprefix("sqlite:///").partition("?")[0]:
        raise ConfigError(f"MLFLOW_TRACKING_URI={uri!r} names no file. Write it as sqlite:///mlflow.db, or unset it.")
    return f"sqlite:///{root / uri.removeprefix('sqlite:///')}"

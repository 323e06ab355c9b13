"""What dvc.lock says: each stage's key, and the pipeline's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from gradaccum.errors import ConfigError
from gradaccum.tracking.memory import md5, results_digest
from gradaccum.tracking.records import digest, flatten

LOCK, PIPELINE, PARAMS = Path("dvc.lock"), Path("dvc.yaml"), "params.yaml"
# They say nothing of what was measured: one writes what the machine is, the other is what reads this.
_WITHOUT_STATE = ("environment", "track")

NAMED = 3
"""How many files a message names; a fresh clone lacks dozens."""


@dataclass(frozen=True)
class LockedStage:
    """One stage as dvc.lock has it; `deps` and `outs` are md5 by path."""

    name: str
    cmd: Any
    deps: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    outs: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Equal for equal command, dependencies, params and results."""
        return digest([self.name, self.cmd, self.deps, self.params, self.outs])

    @property
    def inputs(self) -> str:
        """Equal for equal command, dependencies and params, whatever the results."""
        return digest([self.name, self.cmd, self.deps, self.params])

    @property
    def metrics_file(self) -> Path | None:
        return self._out("metrics.json")

    @property
    def curve_file(self) -> Path | None:
        return self._out("accum-curve.json")

    @property
    def measures(self) -> bool:
        """Whether the stage has a run of its own: it wrote metrics and a curve."""
        return self.metrics_file is not None and self.curve_file is not None

    @property
    def results(self) -> str:
        return results_digest({Path(path).name: value for path, value in self.outs.items()})

    def flat_params(self) -> dict[str, str]:
        """As a live run logs them; those of another params file under its name: `environment.cpu`."""
        flat: dict[str, str] = {}
        for file, params in self.params.items():
            flat |= flatten(params, "" if file == PARAMS else f"{Path(file).stem}.")
        return flat

    def unlike_the_files(self) -> list[str]:
        """The outs that are missing from the working folder, or differ from what dvc.lock has."""
        paths = {path: Path(path) for path in self.outs}
        return [
            name
            for name, path in paths.items()
            if not path.exists() or (path.is_file() and md5(path) != self.outs[name])
        ]

    def _out(self, name: str) -> Path | None:
        return next((Path(path) for path in self.outs if Path(path).name == name), None)


@dataclass(frozen=True)
class Pipeline:
    """All stages of dvc.lock that dvc.yaml still has, by name."""

    stages: Mapping[str, LockedStage]

    @property
    def counted(self) -> list[LockedStage]:
        """The stages that make up the pipeline's state."""
        return [stage for name, stage in sorted(self.stages.items()) if name not in _WITHOUT_STATE]

    @property
    def state(self) -> str:
        """Equal for equal commands, dependencies, params and results of all stages."""
        return digest({stage.name: stage.key for stage in self.counted})

    @property
    def inputs(self) -> str:
        """Equal for equal commands, params and source files of all stages, whatever the results."""
        made = self._made()
        sources = {stage.name: {p: h for p, h in stage.deps.items() if p not in made} for stage in self.counted}
        return digest([[stage.name, stage.cmd, stage.params, sources[stage.name]] for stage in self.counted])

    def stale(self) -> list[str]:
        """The stages that were run on results which are no longer those of the stage that makes them."""
        made = self._made()
        return [
            stage.name
            for stage in self.counted
            if any(made.get(path, value) != value for path, value in stage.deps.items())
        ]

    def problems(self) -> list[str]:
        """Why the working folder is no whole pipeline state, in words a user can act on; empty if it is."""
        unlike = [path for stage in self.counted for path in stage.unlike_the_files()]
        problems = [f"{name} was run on older results than there are now. Run `dvc repro`." for name in self.stale()]
        if unlike:
            files = ", ".join(unlike[:NAMED]) + (f" and {len(unlike) - NAMED} more" if len(unlike) > NAMED else "")
            advice = "Run `dvc checkout` or `dvc repro`, or `dvc pull` where a remote has it."
            problems.append(f"{files}: missing, or not as dvc.lock has it. {advice}")
        return problems

    def _made(self) -> dict[str, str]:
        return {path: value for stage in self.counted for path, value in stage.outs.items()}


def read_pipeline(folder: Path = Path()) -> Pipeline:
    """The pipeline that dvc.lock in this folder describes."""
    locked = _read(folder / LOCK).get("stages", {})
    current = _read(folder / PIPELINE).get("stages", {})
    try:
        stages = {name: _stage(name, entry) for name, entry in locked.items() if name.partition("@")[0] in current}
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{LOCK} has not the shape that DVC gives it. Restore it with `git checkout {LOCK}`."
        ) from error
    return Pipeline(stages)


def question(stage: str) -> str:
    """What the stage asks, as dvc.yaml in the working folder says; empty where it does not."""
    try:
        return str(_read(PIPELINE).get("stages", {}).get(stage, {}).get("desc", ""))
    except ConfigError:
        return ""


def _stage(name: str, entry: Mapping[str, Any]) -> LockedStage:
    return LockedStage(
        name=name,
        cmd=entry.get("cmd"),
        deps=_hashes(entry.get("deps", [])),
        params=entry.get("params", {}),
        outs=_hashes(entry.get("outs", [])),
    )


def _hashes(entries: list[Mapping[str, Any]]) -> dict[str, str]:
    return {entry["path"]: str(entry.get(entry.get("hash", "md5"), "")) for entry in entries}


def _read(path: Path) -> dict[str, Any]:
    try:
        data = YAML(typ="safe").load(
            path.read_text(encoding="utf-8")
        )  # DVC's own reader: YAML 1.2, where `1e-05` is a number
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing from {Path.cwd()}. Run `dvc repro` in the project's root.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Make it a file that you may read.") from error
    except (YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no YAML: {error}. Restore it with `git checkout {path}`.") from error
    return data if isinstance(data, dict) else {}

"""Runs made from result files: those of a stage that DVC found cached, and a pipeline state's. Imports mlflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlflow import MlflowClient

from gradaccum.results.files import read_csv, read_curve, read_json
from gradaccum.results.series import read_back
from gradaccum.tracking.journal import Journal
from gradaccum.tracking.lockfile import LOCK, PARAMS, LockedStage, Pipeline, question
from gradaccum.tracking.provenance import Origin, short_name
from gradaccum.tracking.records import Measured, described, results, series_lines
from gradaccum.tracking.store import Store

HEADLINES = 6
"""How many numbers stand in the description of a run whose findings, which are printed only, are gone."""

_OUTPUTS = Path("outputs")


@dataclass(frozen=True)
class Press:
    """Publishes results of one origin."""

    client: MlflowClient
    store: Store
    origin: Origin

    def stage(self, experiment: str, stage: LockedStage) -> str:
        """A finished run of the stage, from its files; not yet tagged with its key. Returns its id."""
        tags = {"stage": stage.name, "dvc.cached": "true", **self.origin.tags(self.store)}
        journal = self._open(experiment, name=f"{stage.name} {short_name(tags, stage.key)}", tags=tags)
        journal.params(stage.flat_params())
        journal.measured(_measured(stage) + _over_steps(stage))
        journal.files({path.name: path for out in stage.outs for path in _expanded(Path(out))})
        journal.tags({**described(question(stage.name), _headline(stage)), "results": stage.results})
        return self._end(journal)

    def pipeline(self, experiment: str, pipeline: Pipeline, tags: Mapping[str, str]) -> str:
        """A finished run of the pipeline's state, from the files of all stages; not yet tagged with the state."""
        tags = {**self.origin.tags(self.store), **tags}
        journal = self._open(experiment, name=short_name(tags, pipeline.state), tags=tags)
        journal.params({name: text for stage in pipeline.counted for name, text in stage.flat_params().items()})
        measured = Measured((), {})
        for stage in pipeline.counted:
            if stage.measures:
                measured += _measured(stage, f"{stage.name}/")
        journal.measured(measured)
        journal.files(_files(pipeline))
        return self._end(journal)

    def _open(self, experiment: str, *, name: str, tags: Mapping[str, str]) -> Journal:
        return Journal.open(self.client, experiment, name=name, tags=tags, at_ms=self.origin.committed_ms)

    def _end(self, journal: Journal) -> str:
        journal.end("FINISHED", at_ms=self.origin.committed_ms)
        return journal.run_id


def _measured(stage: LockedStage, prefix: str = "") -> Measured:
    assert stage.metrics_file
    assert stage.curve_file
    return results(read_json(stage.metrics_file), read_curve(stage.curve_file), prefix)


def _over_steps(stage: LockedStage) -> Measured:
    assert stage.curve_file
    tables = {Path(out).stem: read_csv(Path(out)) for out in stage.outs if out.endswith(".csv")}
    return series_lines(read_back(read_curve(stage.curve_file), tables))


def _headline(stage: LockedStage) -> list[str]:
    assert stage.metrics_file
    known = {name: value for name, value in read_json(stage.metrics_file).items() if value is not None}
    shown = [f"{name}: {f'{value:.4g}' if isinstance(value, float) else value}" for name, value in known.items()]
    return shown[:HEADLINES]


def _files(pipeline: Pipeline) -> dict[str, bytes | Path]:
    """dvc.lock, params.yaml, and what the stages that measure nothing wrote; figures in one folder."""
    files: dict[str, bytes | Path] = {path.name: path for path in (LOCK, Path(PARAMS)) if path.exists()}
    for stage in pipeline.stages.values():
        if not stage.measures:
            files |= {_artifact(path): path for out in stage.outs for path in _expanded(Path(out))}
    return files


def _artifact(path: Path) -> str:
    if path.suffix == ".png":
        return f"figures/{path.name}"
    return str(path.relative_to(_OUTPUTS)) if path.is_relative_to(_OUTPUTS) else path.name


def _expanded(out: Path) -> Iterator[Path]:
    """The out, or every file in it."""
    return (path for path in (sorted(out.rglob("*")) if out.is_dir() else [out]) if path.is_file())

"""One MLflow run being written: a handful of calls, however much it holds. Importing this imports mlflow."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from gradaccum.tracking.provenance import is_gone
from gradaccum.tracking.records import Measured, Sample, cut_params
from gradaccum.tracking.store import Store

_METRICS_A_CALL = 1000
_PARAMS_A_CALL = 100

Item = TypeVar("Item")


@dataclass(frozen=True)
class Journal:
    """An open run.

    `files` are artifacts by their path in the run, as bytes or as a local file to copy.
    """

    client: MlflowClient
    run_id: str

    @classmethod
    def open(
        cls, client: MlflowClient, experiment: str, *, name: str, tags: Mapping[str, str], at_ms: int | None = None
    ) -> Journal:
        """A run that began at `at_ms` since 1970; now where that is None."""
        run = client.create_run(experiment, start_time=at_ms, run_name=name, tags=dict(tags))
        return cls(client, run.info.run_id)

    def params(self, flat: Mapping[str, str]) -> None:
        cut, whole = cut_params(flat)
        for chunk in _chunks([Param(name, text) for name, text in cut.items()], _PARAMS_A_CALL):
            self.client.log_batch(self.run_id, params=chunk)
        self.files({f"params/{file}": text.encode() for file, text in whole.items()})

    def measured(self, measured: Measured) -> None:
        now = int(time.time() * 1000)
        for metrics in _chunks([_metric(sample, now) for sample in measured.samples], _METRICS_A_CALL):
            self.client.log_batch(self.run_id, metrics=metrics)
        self.tags(measured.tags)

    def tags(self, tags: Mapping[str, str]) -> None:
        for chunk in _chunks([RunTag(name, text) for name, text in tags.items()], _PARAMS_A_CALL):
            self.client.log_batch(self.run_id, tags=chunk)

    def files(self, files: Mapping[str, bytes | Path]) -> None:
        if not files:
            return
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content if isinstance(content, bytes) else content.read_bytes())
            self.client.log_artifacts(self.run_id, folder)

    def end(self, status: str, *, at_ms: int | None = None) -> None:
        self.client.set_terminated(self.run_id, status, at_ms)


def bury_the_dead(client: MlflowClient, store: Store, experiments: Sequence[str]) -> None:
    """Mark as KILLED the runs that still say RUNNING though their process, on this host and repository, is gone."""
    here = f"attributes.status = 'RUNNING' AND tags.`process.host` = '{socket.gethostname()}'"
    for run in client.search_runs(list(experiments), here):
        if run.data.tags.get("repository") == str(store.root) and is_gone(run.data.tags):
            client.set_terminated(run.info.run_id, "KILLED")


def _metric(sample: Sample, now: int) -> Metric:
    return Metric(sample.name, sample.value, now + sample.rank, sample.step)


def _chunks(items: Sequence[Item], size: int) -> Iterator[list[Item]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])

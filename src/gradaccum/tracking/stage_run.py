"""One stage's live run in MLflow: opened before measuring, ended as what became of it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from gradaccum.results.outcome import Outcome
from gradaccum.tracking.lockfile import question
from gradaccum.tracking.memory import md5, remember_run, results_digest
from gradaccum.tracking.patience import Patience, tracking_mode
from gradaccum.tracking.provenance import here, short_name
from gradaccum.tracking.records import described, digest, flatten, results, series_lines
from gradaccum.tracking.store import Store, locate

if TYPE_CHECKING:
    from gradaccum.tracking.journal import Journal


SAID = 4
"""How many findings a run's description holds, broken claims first."""


class Terminated(SystemExit):
    """SIGTERM reached this process."""


class StageRun:
    """A stage's run. Where tracking is off, or the store is lost, every call is empty."""

    def __init__(self, stage: str, store: Store, patience: Patience | None) -> None:
        self.stage = stage
        self._store = store
        self._patience = patience
        self._journal: Journal | None = None

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None where there is none."""
        return self._journal.run_id if self._journal else None

    def open(self, params: Mapping[str, Any]) -> None:
        if self._patience:
            self._patience.has_results = False
            self._patience.call("be reached without the package mlflow", _import_mlflow, limited=False)
            self._journal = self._patience.call("open a run", lambda: _open(self._store, self.stage, params))
            self._patience.has_results = True

    def log(
        self, outcome: Outcome, *, artifacts: Sequence[Path] = (), figures: Mapping[str, bytes] | None = None
    ) -> None:
        """Log everything that a measurement hands over; `figures` are PNG bytes by file name."""
        files: dict[str, bytes | Path] = {path.name: path for path in artifacts}
        files |= {f"figures/{name}": png for name, png in (figures or {}).items()}
        made = results_digest({path.name: md5(path) for path in artifacts})

        def write(journal: Journal) -> None:
            _log(journal, outcome, files, digest_of_results=made)
            remember_run(self.stage, journal.run_id, store=self._store, results=made)

        self._write("take the results", write)

    def end(self, status: str) -> None:
        self._write("end the run", lambda journal: journal.end(status))

    def _write(self, doing: str, function: Callable[[Journal], None]) -> None:
        if self._patience and self._journal:
            journal = self._journal
            self._patience.call(doing, lambda: function(journal))


@contextmanager
def stage_run(stage: str, params: Mapping[str, Any]) -> Iterator[StageRun]:
    """Track what happens inside as one run of `stage`.

    The run ends FINISHED, FAILED when something is raised, or KILLED on SIGTERM and Ctrl-C. `params` may be nested.
    With GRADACCUM_TRACKING=off nothing is imported and nothing logged; with `on` (the default) a store that fails
    costs one warning; with `strict` it raises TrackingError.
    """
    mode, store = tracking_mode(), locate()
    run = StageRun(stage, store, None if mode == "off" else Patience(store.label, strict=mode == "strict"))
    with _sigterm_raises():
        run.open(params)
        try:
            yield run
        except BaseException as error:
            run.end(_status_of(error))
            raise
        run.end("FINISHED")


def _import_mlflow() -> None:
    import gradaccum.tracking.client  # noqa: PLC0415 - mlflow takes a second
    import gradaccum.tracking.journal  # noqa: F401, PLC0415 - likewise


def _open(store: Store, stage: str, params: Mapping[str, Any]) -> Journal:
    from gradaccum.tracking.client import experiment_id, open_client  # noqa: PLC0415 - by now imported
    from gradaccum.tracking.journal import Journal, bury_the_dead  # noqa: PLC0415 - likewise

    client = open_client(store)
    experiment = experiment_id(client, store, store.stages_name)
    bury_the_dead(client, store, [experiment])
    flat = flatten(params)
    tags = {"stage": stage, "params.digest": digest(flat), **here().tags(store)}
    name = f"{stage} {short_name(tags, tags['params.digest'])}"
    journal = Journal.open(client, experiment, name=name, tags=tags)
    journal.params(flat)
    return journal


def _log(journal: Journal, outcome: Outcome, files: Mapping[str, bytes | Path], *, digest_of_results: str) -> None:
    journal.measured(results(outcome.metrics, outcome.curve) + series_lines(outcome.series))
    journal.files(files)
    said = described(question(outcome.curve.stage), [*outcome.failures, *outcome.findings][:SAID])
    journal.tags({**said, "results": digest_of_results})  # last: it says that everything above is there


def _status_of(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt | Terminated):
        return "KILLED"
    return "FINISHED" if isinstance(error, SystemExit) and not error.code else "FAILED"


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM unwinds the stack, so that the run can be ended; exit status 143, as a shell reports the signal."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not cut the ending short
    raise Terminated(128 + number)

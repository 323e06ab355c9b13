"""The pipeline's last stage, and `gradaccum sync`: both make MLflow agree with the files."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradaccum.errors import ConfigError, GradaccumError
from gradaccum.tracking.history import hindrance, laid_out, open_cache, past
from gradaccum.tracking.lockfile import LOCK, Pipeline, read_pipeline
from gradaccum.tracking.memory import has_unclaimed_runs, is_published
from gradaccum.tracking.patience import STAGE_SECONDS, Patience, TrackingError, tracking_mode
from gradaccum.tracking.provenance import Origin, here
from gradaccum.tracking.store import Store, locate

if TYPE_CHECKING:
    from gradaccum.tracking.agreement import Agreement

SYNC_SECONDS = 600.0

_log = logging.getLogger("gradaccum.tracking")


def track() -> None:
    """Publish the pipeline's state; where nothing changed since, end without importing mlflow.

    Raises:
        TrackingError: with GRADACCUM_TRACKING=strict, where the state could not be published. Otherwise that costs
            one warning: a last stage that fails would make `dvc exp run` throw the experiment away.
    """
    mode, store = tracking_mode(), locate()
    if mode == "off":
        return
    try:
        pipeline = read_pipeline()
    except ConfigError as error:
        _complain([str(error)], strict=mode == "strict")
        return
    if is_published(store, pipeline.state, os.environ.get("DVC_EXP_NAME", "")) and not has_unclaimed_runs():
        print(f"MLflow: nothing new for {store.label}")
        return
    _publish(store, pipeline, Patience(store.label, seconds=STAGE_SECONDS, strict=mode == "strict"))


def sync() -> None:
    """Publish whatever MLflow lacks of the working folder's state.

    Raises:
        ConfigError: this is no pipeline's folder.
        TrackingError: something could not be published, and why.
    """
    store = locate()
    _publish(store, read_pipeline(), Patience(store.label, seconds=SYNC_SECONDS, strict=True))


def sync_all() -> None:
    """Publish the states of all commits and experiments that MLflow lacks, oldest first, then the working folder's.

    What cannot be published is told and left out: its results are not in DVC's cache, or it is no whole state.

    Raises:
        ConfigError: this is no pipeline's folder, in a repository of git and DVC.
        TrackingError: as of `sync`.
    """
    store, folder = locate(), Path.cwd()
    origins, cache = past(folder), open_cache(store.root)
    done = {origin: _publish_past(store, cache, origin, folder=folder) for origin in origins}
    for origin, how in done.items():
        if how not in ("as it was", "published"):
            _log.warning("%s is left out. %s", f"{origin.commit[:7]} {origin.experiment}".strip(), how)
    there, made = (list(done.values()).count(how) for how in ("as it was", "published"))
    print(f"MLflow: of {len(done)} past states {there} were there, {made} are published. Store: {store.label}")
    if LOCK.exists():
        sync()


def _publish_past(store: Store, cache: Any, origin: Origin, *, folder: Path) -> str:
    """How the state's run came about: `as it was`, `published`; else why there is none."""
    from gradaccum.tracking.agreement import has_run  # noqa: PLC0415 - mlflow takes a second

    patience = Patience(store.label, seconds=SYNC_SECONDS, strict=True)
    try:
        with laid_out(folder, origin) as pipeline:
            if patience.call("say what it has", lambda: has_run(store, pipeline, origin)):
                return "as it was"
            if why := hindrance(cache, pipeline):
                return why
            agreement = patience.call("take a past state", lambda: _agreement(store, pipeline, origin))
    except ConfigError as error:
        return str(error)
    assert agreement  # strict patience raises instead
    return " ".join(agreement.problems) or agreement.runs.get("pipeline", "It has no measurement.")


def _publish(store: Store, pipeline: Pipeline, patience: Patience) -> None:
    agreement = patience.call("take the pipeline's state", lambda: _agreement(store, pipeline, here()))
    if agreement is not None:
        print(f"MLflow: {agreement}. Store: {store.label}")
        _complain(agreement.problems, strict=patience.strict)


def _agreement(store: Store, pipeline: Pipeline, origin: Origin) -> Agreement:
    """Agree; a result file that cannot be read is a problem of that state, not the store's."""
    from gradaccum.tracking.agreement import Agreement, agree  # noqa: PLC0415 - mlflow takes a second

    try:
        return agree(store, pipeline, origin)
    except GradaccumError as error:
        return Agreement({}, [str(error)])


def _complain(problems: Sequence[str], *, strict: bool) -> None:
    if not problems:
        return
    message = "No pipeline run was published. " + " ".join(problems)
    if strict:
        raise TrackingError(message)
    _log.warning(message)

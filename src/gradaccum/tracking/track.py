"""The pipeline's last stage, and `gradaccum sync`: both make MLflow agree with the working folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from gradaccum.errors import ConfigError
from gradaccum.tracking.lockfile import Pipeline, read_pipeline
from gradaccum.tracking.memory import has_unclaimed_runs, is_published
from gradaccum.tracking.patience import STAGE_SECONDS, Patience, TrackingError, tracking_mode
from gradaccum.tracking.store import Store, locate

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


def _publish(store: Store, pipeline: Pipeline, patience: Patience) -> None:
    def publish() -> tuple[str, list[str]]:
        from gradaccum.tracking.agreement import agree  # noqa: PLC0415 - mlflow takes a second

        agreement = agree(store, pipeline)
        return str(agreement), agreement.problems

    done = patience.call("take the pipeline's state", publish)
    if done is not None:
        print(f"MLflow: {done[0]}. Store: {store.label}")
        _complain(done[1], strict=patience.strict)


def _complain(problems: Sequence[str], *, strict: bool) -> None:
    if not problems:
        return
    message = "No pipeline run was published. " + " ".join(problems)
    if strict:
        raise TrackingError(message)
    _log.warning(message)

"""The pipeline's last stage, and `gradaccum sync`: both make MLflow agree with the files."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradaccum.errors import ConfigError, GradaccumError
from gradaccum.tracking.history import NOT_CACHED, Cache, LeftOut, hindrance, laid_out, open_cache, past
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


def sync_all(*, verbose: bool) -> None:
    """Publish the states of all commits and experiments that MLflow lacks, oldest first, then the working folder's.

    What cannot be published is counted and left out - its results are not in DVC's cache, or it is no whole state - and
    where this is `verbose`, named.

    Raises:
        ConfigError: this is no pipeline's folder, in a repository of git and DVC.
        TrackingError: as of `sync`.
    """
    store, folder = locate(), Path.cwd()
    origins, cache = past(folder), open_cache(store.root)
    done = {origin: _publish_past(store, cache, origin, folder=folder) for origin in origins}
    left_out = {origin: how for origin, how in done.items() if isinstance(how, LeftOut)}
    if verbose:
        for origin, how in left_out.items():
            print(f"{f'{origin.commit[:7]} {origin.experiment}'.strip()}: {how.kind}: {how.why}.")
    print(f"MLflow: {_counted(list(done.values()))}. Store: {store.label}")
    if advice := _advice(left_out, cache, verbose=verbose):
        print(advice)
    if LOCK.exists():
        sync()


def _counted(done: Sequence[str | LeftOut]) -> str:
    """`of 7 past states, 1 unchanged, 4 published from the files, 2 left out (2 not in DVC's cache)`."""
    hows = Counter(how for how in done if isinstance(how, str))
    kinds = Counter(how.kind for how in done if isinstance(how, LeftOut))
    counts = [f"{number} {how}" for how, number in hows.items()]
    if kinds:
        told = "; ".join(f"{number} {kind}" for kind, number in kinds.items())
        counts.append(f"{kinds.total()} left out ({told})")
    return ", ".join([f"of {len(done)} past states", *counts])


def _advice(left_out: Mapping[Origin, LeftOut], cache: Cache, *, verbose: bool) -> str:
    """What to do about the states left out, without naming them: there may be hundreds."""
    named = "" if verbose or not left_out else " `gradaccum sync --all -v` names what is left out."
    uncached = any(how.kind == NOT_CACHED for how in left_out.values())
    if uncached and cache.has_remote:
        return f"`dvc fetch --all-commits` and `dvc exp pull` get what a remote has; then sync again.{named}"
    return f"Without a remote, only running such a state again brings its run.{named}" if uncached else named.strip()


def _publish_past(store: Store, cache: Cache, origin: Origin, *, folder: Path) -> str | LeftOut:
    """How the state's run came about; else why there is none."""
    from gradaccum.tracking.agreement import UNCHANGED, has_run  # noqa: PLC0415 - mlflow takes a second

    patience = Patience(store.label, seconds=SYNC_SECONDS, strict=True)
    try:
        with laid_out(folder, origin) as pipeline:
            if patience.call("say what it has", lambda: has_run(store, pipeline, origin)):
                return UNCHANGED
            if hindered := hindrance(cache, pipeline):
                return hindered
            agreement = patience.call("take a past state", lambda: _agreement(store, pipeline, origin))
    except ConfigError as error:
        return LeftOut("not readable", " ".join(str(error).split()).removesuffix("."))
    assert agreement  # strict patience raises instead
    if agreement.problems:
        return LeftOut("not as its dvc.lock says", " ".join(agreement.problems).removesuffix("."))
    return agreement.runs.get("pipeline") or LeftOut("without a measurement", "dvc.lock names none")


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

"""Calls to the store that may neither fail nor delay what is measured."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from gradaccum.errors import ConfigError, GradaccumError
from gradaccum.tracking.store import redact

MODES = ("off", "on", "strict")
STAGE_SECONDS = 25.0
LATER = "`gradaccum sync` publishes them when the store answers again."
THREAD = "gradaccum-tracking"

_NOTHING_MEASURED = (
    "Nothing was measured, as GRADACCUM_TRACKING=strict wants each run tracked. Start the store, or set "
    "GRADACCUM_TRACKING=on to measure without it. Outputs that DVC removed come back with `git checkout .` and "
    "`dvc checkout --force`."
)

_log = logging.getLogger("gradaccum.tracking")

Result = TypeVar("Result")


class TrackingError(GradaccumError):
    """MLflow did not take a run, and GRADACCUM_TRACKING=strict makes that count."""


def tracking_mode() -> str:
    """`off`, `on` or `strict`, from GRADACCUM_TRACKING."""
    mode = os.environ.get("GRADACCUM_TRACKING", "on")
    if mode not in MODES:
        raise ConfigError(f"GRADACCUM_TRACKING={mode!r} is unknown. Set it to one of {', '.join(MODES)}.")
    return mode


class Patience:
    """A budget of seconds for calls to the store: once it or a call has failed, one warning and no further call.

    Where there are no results yet, `has_results` is False: a strict one then ends the stage before it measures.
    """

    def __init__(self, store: str, *, seconds: float = STAGE_SECONDS, strict: bool = False) -> None:
        self.store = store
        self.left = seconds
        self.strict = strict
        self.lost = False
        self.has_results = True

    def call(self, doing: str, function: Callable[[], Result], *, limited: bool = True) -> Result | None:
        """The function's result, or None where the store is lost. The rest of a call that hangs is left behind.

        Not `limited` is what waits for this machine alone, as an import does: it takes as long as it takes.
        """
        if self.lost:
            return None
        outcome: dict[str, Any] = {}
        started = time.monotonic()
        thread = threading.Thread(target=_into, args=(outcome, function), name=THREAD, daemon=True)
        thread.start()
        thread.join(max(self.left, 0) if limited else None)
        self.left -= time.monotonic() - started if limited else 0
        if "result" in outcome:
            return outcome["result"]  # type: ignore[no-any-return]
        self._lose(doing, outcome.get("error"))
        return None

    def _lose(self, doing: str, error: BaseException | None) -> None:
        self.lost = True
        reason = redact(_reason(error)) if error else "no answer in time"
        then = "move that file away, then `gradaccum sync --all` rebuilds it." if _is_corrupt(reason) else LATER
        message = f"MLflow at {self.store} could not {doing}: {reason}."
        kept = f"The results are kept as files; {then}"
        if self.strict:
            raise TrackingError(f"{message} {kept if self.has_results else _NOTHING_MEASURED}")
        _log.warning("%s %s", message, kept)


def _into(outcome: dict[str, Any], function: Callable[[], Any]) -> None:
    try:
        outcome["result"] = function()
    except BaseException as error:  # noqa: BLE001 - handed to the waiting thread, whatever it is
        outcome["error"] = error


def _is_corrupt(reason: str) -> bool:
    """Whether sqlite says, in words of its own, that the file is no database any more."""
    return any(words in reason for words in ("file is not a database", "database disk image is malformed"))


def _reason(error: BaseException) -> str:
    """One line: the network's own word where there is one, which MLflow wraps in a paragraph."""
    inner: BaseException | None = error
    while inner and not (isinstance(inner, OSError) and type(inner).__module__ == "builtins"):
        inner = inner.__cause__ or inner.__context__
    lines = str(inner or error).strip().splitlines()
    return f"{type(inner or error).__name__}: {lines[0][:300]}" if lines else type(error).__name__

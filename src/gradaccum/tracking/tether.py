"""Servers that end with whoever started them, also where that was killed."""

from __future__ import annotations

import shutil
import signal


def tethered(number: signal.Signals, command: list[str]) -> list[str]:
    """The command, to be sent this signal when the thread that starts it ends; as it is where Linux's setpriv lacks."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", number.name.removeprefix("SIG"), "--", *command] if setpriv else command

"""A killed test run, or a killed `make server`, leaves no server behind."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from gradaccum.tracking.tether import tethered
from tests.tracking.dvc_project import wait_until

STARTER = f"""
import subprocess, time
child = subprocess.Popen({tethered(signal.SIGINT, ["sleep", "60"])}, start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs util-linux's setpriv")
def test_a_server_ends_when_whoever_started_it_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        child = psutil.Process(int(starter.stdout.readline()))
        wait_until(lambda: child.name() == "sleep")
        starter.kill()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, seconds=30)

"""Every command block of README, run in a clone; the install alone is taken as done."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.clone import ROOT, Clone, clone_working_tree

pytestmark = pytest.mark.e2e

README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
FILE = re.compile(r"# (\w+\.py)\n")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone whose .venv is this environment."""
    made = clone_working_tree(tmp_path_factory.mktemp("readme"))
    (made.root / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        (made.root / ".venv" / entry.name).symlink_to(entry)
    installed = made.root / ".venv/.installed"
    installed.unlink(missing_ok=True)
    installed.touch()
    for block in PYTHON:
        if name := FILE.match(block):
            (made.root / name[1]).write_text(block)
    return made


def test_every_command_block_runs(clone: Clone) -> None:
    script = "set -e\n" + "\n".join(COMMANDS)
    environment = {"PYTEST_ADDOPTS": "--collect-only --quiet", "GRADACCUM_TRACKING": "strict"}
    done = clone.run("bash", "-c", script, check=False, timeout=500, **environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("block", [block for block in PYTHON if not FILE.match(block)])
def test_every_python_block_runs(clone: Clone, block: str) -> None:
    done = clone.run(sys.executable, "-W", "error", "-c", block, PYTHONPATH=str(clone.root / "src"))
    assert re.search(r"loss \d", done.stdout)


def test_the_ui_answers_at_the_address_it_prints(clone: Clone) -> None:
    port = free_port()
    command = ["make", "ui", f"PORT={port}"]
    with subprocess.Popen(
        command, cwd=clone.root, stdout=subprocess.PIPE, text=True, start_new_session=True, env=os.environ
    ) as server:
        try:
            assert server.stdout is not None
            said = "".join(server.stdout.readline() for _ in range(4))
            assert f"http://127.0.0.1:{port}" in said
            assert str(clone.root / "mlflow.db") in said
            assert answers(f"http://127.0.0.1:{port}/health")
        finally:
            os.killpg(server.pid, signal.SIGTERM)


def test_every_link_and_picture_of_readme_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers(address: str) -> bool:
    for _ in range(150):
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            time.sleep(0.4)
    return False

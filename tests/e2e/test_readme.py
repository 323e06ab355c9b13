"""README's python, addresses, links and experiments; its command blocks are run in test_pipeline."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from gradaccum.config import read_params, section, shared
from gradaccum.measurements.setup import Setup
from tests.e2e.clone import ROOT, clone_working_tree
from tests.e2e.readme import COMMANDS, EXPERIMENTS, FILES, PYTHON, TEXT

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("block", [block for block in PYTHON if block not in FILES.values()])
def test_every_python_block_runs(block: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-W", "error", "-c", block]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"loss \d", done.stdout)


def test_the_ui_answers_at_the_address_it_prints(tmp_path: Path) -> None:
    clone, port = clone_working_tree(tmp_path), free_port()
    clone.take_environment()
    with subprocess.Popen(
        ["make", "ui", f"PORT={port}"],
        cwd=clone.root,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ,
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
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_every_make_target_of_readme_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make\s(\w+)", TEXT, re.MULTILINE))
    assert {"repro", "test", "ui", "server"} <= named <= targets


def test_every_experiment_in_a_block_starts_from_what_is_committed() -> None:
    before = [first.partition(" -")[0] for first, then in pairwise(COMMANDS) if then.startswith("dvc exp run")]
    assert before
    assert set(before) <= {"git commit", "git checkout ."}


def test_no_command_in_a_block_waits_in_a_pager() -> None:
    assert all("--no-pager" in each for each in COMMANDS if each.startswith("dvc exp show"))


@pytest.mark.parametrize("experiment", sorted(set(EXPERIMENTS)))
def test_every_experiment_sets_what_is_valid_and_runs_stages_that_exist(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, block in FILES.items():
        (tmp_path / name).write_text(block)
    params = read_params(ROOT / "params.yaml")
    blocks = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    _, _, _, *words = shlex.split(experiment)
    changed = [word.partition("=") for before, word in pairwise(words) if before == "-S"]
    assert changed
    for key, _, value in changed:
        *path, last = key.split(".")
        holder = params
        for name in path:
            holder = holder[name]
        assert last in holder
        holder[last] = yaml.safe_load(value)
    monkeypatch.chdir(tmp_path)
    shared(params, Setup)
    for name in {key.split(".")[0] for key, _, _ in changed} & set(blocks):
        section(params, name, import_module(f"gradaccum.measurements.{name}").Config)
    assert set(words[2 * len(changed) :]) <= set(blocks)


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

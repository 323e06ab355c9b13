"""A rank that is killed, or raises, in the middle of a window: the stage fails with a message and leaves nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from tests.distributed import models
from tests.distributed.test_gradients import one_process
from tests.engine.reference import assert_same

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.distributed


def project(folder: Path, workload: str) -> Path:
    """A folder from which the stage can run, and what an earlier run left in it."""
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    params["workload"] = {"name": workload}
    params["distributed"] |= {"strategies": ["ddp"], "accum_steps": [3], "num_steps": 3, "repeats": 1}
    (folder / "params.yaml").write_text(yaml.safe_dump(params))
    (folder / "tests").symlink_to(ROOT / "tests")
    return folder


def run_stage(
    folder: Path, *options: str, script: Path = ROOT / "stages/distributed.py", **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[int]]:
    """The stage as dvc.yaml starts it, or another script, and the processes that were started."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    inherited = {
        **os.environ,
        "GRADACCUM_TRACKING": "off",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{folder}",
    } | environment
    with subprocess.Popen(
        [*command, *options, str(script)],
        cwd=folder,
        env=inherited,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        started: set[int] = set()
        while process.returncode is None:
            try:
                out, err = process.communicate(timeout=0.2)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(psutil.NoSuchProcess):
                    started |= {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    return subprocess.CompletedProcess(command, process.returncode, out, err), sorted(started)


def alive(pids: list[int]) -> list[Any]:
    return [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.parametrize(
    ("workload", "messages"),
    [
        ("killed", ["rank 0: another rank was lost in the middle of a window", "exitcode  : -9"]),
        ("raising", ["ArithmeticError: the loss is not to be had", "rank 0: another rank was lost"]),
    ],
)
def test_a_rank_that_fails_in_mid_window_fails_the_stage(tmp_path: Path, workload: str, messages: list[str]) -> None:
    done, pids = run_stage(project(tmp_path, f"tests.distributed.faulty_workload:{workload}"))
    assert done.returncode == 1
    for message in messages:
        assert message in done.stderr, done.stderr
    assert "git checkout . && dvc checkout --force" in done.stderr
    assert len(pids) >= 2
    assert alive(pids) == []
    assert not (tmp_path / "outputs").exists()


def test_the_script_that_the_docs_show_runs_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(models.docs_block("train.py"))
    done, _ = run_stage(tmp_path, script=tmp_path / "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss ")
    assert ", reductions: 1, bytes: 252" in done.stdout


def test_torchrun_restarts_what_failed_and_it_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints.py").write_text(models.docs_block("checkpoints.py"))
    script = ROOT / "tests/distributed/restarted.py"
    done, _ = run_stage(tmp_path, "--max-restarts=1", script=script, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert done.returncode == 0, done.stderr
    assert "rank 1 fails before its third window" in done.stderr
    expected = one_process(num_steps=4)["parameters"]
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found["resumed_at"] == 2
        assert_same(found["parameters"], expected)

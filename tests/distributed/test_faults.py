"""A rank that is killed, or raises, in the middle of a window: the stage fails with a message and leaves nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

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
    folder: Path, *, ranks: int = 2, script: Path = ROOT / "stages/distributed.py"
) -> tuple[subprocess.CompletedProcess[str], list[int]]:
    """The stage as dvc.yaml starts it, or another script, and the processes that were started."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    inherited = {**os.environ, "GRADACCUM_TRACKING": "off", "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(
        [*command, str(script)],
        cwd=folder,
        env=inherited,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        started: set[int] = set()
        while True:
            try:
                out, err = process.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
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


def test_another_number_of_ranks_than_written_down_is_refused(tmp_path: Path) -> None:
    done, _ = run_stage(project(tmp_path, "tests.own_workload:regression"), ranks=1)
    assert done.returncode == 1
    assert "torchrun started 1 ranks, but distributed.world_size is 2" in done.stderr


def test_the_script_that_the_docs_show_runs_on_two_ranks(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/many-ranks.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(block)
    done, _ = run_stage(tmp_path, script=tmp_path / "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss ")
    assert ", 1 reductions, 252 bytes" in done.stdout

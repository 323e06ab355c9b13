"""The first stage, run as DVC runs it: all that can be told without torch is told there, at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def run(folder: Path, **changes: Any) -> subprocess.CompletedProcess[str]:
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    (folder / "params.yaml").write_text(yaml.safe_dump(params | changes))
    command = [sys.executable, str(ROOT / "stages/environment.py")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_valid_params_are_answered_with_the_machine(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "outputs/environment.json").read_text())
    assert facts["cores"] >= 1
    assert facts["workload_source"] is None


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    workload = {"name": "synthetic", "synthetic": {"in_features": 0, "hidden": 8, "out_features": 2, "samples": 9}}
    done = run(tmp_path, workload=workload, threads=0, ablation={}, plann={}, seed=-1)
    assert done.returncode == 1
    said = done.stderr.replace("\n", " ")
    for wrong in ("workload.synthetic.in_features = 0", "threads = 0", "seed = -1", "ablation.num_steps", "'plann'"):
        assert wrong in said
    assert "Traceback" not in said
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("workload", "told"),
    [
        ({"name": "mine:nothing"}, "mine has no 'nothing'"),
        ({"name": "mine:tiny", "tiny": {"wrong": 3}}, "got an unexpected keyword argument 'wrong'"),
    ],
)
def test_a_factory_that_cannot_be_right_is_refused_before_torch_is_imported(
    tmp_path: Path, workload: dict[str, Any], told: str
) -> None:
    (tmp_path / "mine.py").write_text("import torch\n\ndef tiny(hidden=3): ...\n")
    done = run(tmp_path, workload=workload)
    assert done.returncode == 1
    assert told in done.stderr
    assert "Traceback" not in done.stderr

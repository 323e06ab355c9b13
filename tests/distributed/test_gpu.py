"""The same stage over NCCL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from tests.distributed.test_faults import project, run_stage

pytestmark = pytest.mark.distributed


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a CUDA device for each of two ranks")
@pytest.mark.parametrize("strategies", [["ddp"], ["fsdp2"]], ids=str)
def test_the_stage_holds_over_nccl(tmp_path: Path, strategies: list[str]) -> None:
    params = project(tmp_path, "tests.own_workload:regression") / "params.yaml"
    changed = yaml.safe_load(params.read_text()) | {"device": "cuda"}
    changed["distributed"] |= {"strategies": strategies}
    params.write_text(yaml.safe_dump(changed))
    done, _ = run_stage(tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "outputs/distributed/metrics.json").read_text())
    assert metrics["equivalent"] is True
    assert metrics[f"{strategies[0]}/reduced_bytes_ratio"] == pytest.approx(3)


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="needs a machine that lacks a CUDA device for a rank")
def test_cuda_without_a_device_for_every_rank_is_refused(tmp_path: Path) -> None:
    params = project(tmp_path, "tests.own_workload:regression") / "params.yaml"
    params.write_text(yaml.safe_dump(yaml.safe_load(params.read_text()) | {"device": "cuda"}))
    done, _ = run_stage(tmp_path)
    assert done.returncode == 1
    found = torch.cuda.device_count()
    assert f"device = 'cuda' for 2 ranks on this machine, which has {found} CUDA devices" in done.stderr

"""Every test starts from a clean environment: no inherited DVC stage, no inherited tracker, one thread."""

from __future__ import annotations

import os

import pytest
import torch

INHERITED = ("DVC_", "MLFLOW_", "GRADACCUM_", "GIT_")

for name in [name for name in os.environ if name.startswith(INHERITED)]:
    del os.environ[name]
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start


@pytest.fixture(autouse=True)
def one_thread_and_one_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)

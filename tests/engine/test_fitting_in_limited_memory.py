"""Memory runs out for real: tests that need that run in a process whose address space is limited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

LIMITED = """
import json, resource, sys
import torch
from torch import nn
from gradaccum import Accumulator, Objective, fit_micro_batch
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 10))
accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), Objective.classification())
batch = (torch.randn(4096, 64), torch.randint(10, (4096,)))
accumulator.step_batch((batch[0][:2], batch[1][:2]))  # what torch loads at a first step is no part of the limit
used = 1024 * int(next(l for l in open("/proc/self/status") if l.startswith("VmSize")).split()[1])
resource.setrlimit(resource.RLIMIT_AS, (used + 96 * 2**20, resource.RLIM_INFINITY))
"""


def limited(ending: str) -> Any:
    """What a process prints whose address space may grow by 96 MiB, where one whole batch takes four times as much."""
    if not sys.platform.startswith("linux"):
        pytest.skip("address space is limited on Linux only")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED + ending],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # so that the address space is what is in use, no more
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_under_a_real_limit_training_goes_on_with_a_smaller_micro_batch() -> None:
    seen = limited(
        "results = [accumulator.step_batch(batch) for _ in range(2)]\n"
        "print(json.dumps([[each.micro_batches, each.samples, each.applied] for each in results]))"
    )
    (pieces, samples, applied), again = seen
    assert pieces >= 4
    assert (samples, applied) == (4096, True)
    assert again == [pieces, samples, applied]


def test_under_a_real_limit_the_micro_batch_that_fits_is_found_and_trains() -> None:
    micro, steps, pieces = limited(
        "plan = fit_micro_batch(accumulator, batch)\n"
        "result = accumulator.step_batch(batch, plan.micro_batch)\n"
        "print(json.dumps([plan.micro_batch, plan.accum_steps, result.micro_batches]))"
    )
    assert 64 <= micro <= 1024
    assert micro * steps == 4096
    assert pieces == steps

"""Memory runs out for real: tests that need that run in a process whose address space is limited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradaccum import Accumulator, BatchError, BatchPlan, ConfigError, Objective, fit_micro_batch
from gradaccum.engine.fitting import is_out_of_memory
from gradaccum.engine.observer import NoObserver
from gradaccum.engine.random_state import random_state

SAMPLES = 24


class Running(nn.Module):
    """Subtracts a running mean, which every forward pass moves, and takes any number of samples."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean.lerp_(inputs.detach().mean(0), 0.1)
        return inputs - self.mean.clone()


class Model(nn.Module):
    """With buffers that a forward pass changes, random numbers, and a forward pass that is too large for memory."""

    def __init__(self, most: int = SAMPLES) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 8), Running(), nn.Dropout(0.3), nn.Linear(8, 3))
        self.most = most
        self.seen: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append(len(inputs))
        outputs: Tensor = self.inner(inputs)
        if len(inputs) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return outputs


def made(most: int = SAMPLES, **options: Any) -> Accumulator:
    torch.manual_seed(3)
    model = Model(most)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return Accumulator(model, optimizer, Objective.classification(), scheduler=scheduler, **options)


class Watching(NoObserver):
    """Notes every window whose gradient it is shown."""

    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def finish(self, grad_norm: Tensor, count: float) -> None:
        self.seen.append(1)


def batches(number: int, samples: int = SAMPLES) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(samples, 5, generator=generator), torch.randint(3, (samples,), generator=generator))
        for _ in range(number)
    ]


def whole_state(accumulator: Accumulator) -> list[Tensor]:
    """Every tensor of model, gradient, optimizer and random state."""
    found: list[Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, Tensor):
            found.append(value.clone())
        elif isinstance(value, dict):
            for each in value.values():
                collect(each)
        elif isinstance(value, list | tuple):
            for each in value:
                collect(each)
        elif isinstance(value, int | float):
            found.append(torch.tensor(value, dtype=torch.float64))

    collect(accumulator.model.state_dict())
    collect([parameter.grad for parameter in accumulator.model.parameters()])
    collect(accumulator.state_dict())
    collect(random_state())
    return found


def assert_same_bits(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


@pytest.mark.parametrize(("most", "fits"), [(24, 24), (12, 12), (11, 6), (5, 3), (1, 1)])
def test_a_batch_that_does_not_fit_is_halved_until_it_does(most: int, fits: int) -> None:
    accumulator = made(most)
    (batch,) = batches(1)
    assert accumulator.step_batch(batch).micro_batches == -(-SAMPLES // fits)
    assert accumulator.model.seen[-1] == SAMPLES % fits or fits


@pytest.mark.parametrize("most", [12, 7, 1])
def test_a_halved_run_is_to_the_last_bit_the_run_with_that_micro_batch_from_the_start(most: int) -> None:
    halved = made(most, clip_norm=1.0)
    results = [halved.step_batch(batch) for batch in batches(5)]
    size = max(each for each in halved.model.seen if each <= most)
    direct = made(SAMPLES, clip_norm=1.0)
    expected = [direct.step_batch(batch, size) for batch in batches(5)]
    assert [float(each.loss) for each in results] == [float(each.loss) for each in expected]
    assert_same_bits(whole_state(halved), whole_state(direct))


def test_what_fitted_is_remembered_and_a_smaller_batch_is_left_whole() -> None:
    accumulator = made(6)
    for batch in batches(2):
        accumulator.step_batch(batch)
    accumulator.step_batch(batches(1, samples=5)[0])
    assert accumulator.model.seen == [24, 12, 6, 6, 6, 6] + [6] * 4 + [5]


def test_a_given_micro_batch_is_used_as_it_is() -> None:
    accumulator = made()
    result = accumulator.step_batch(batches(1)[0], 10)
    assert accumulator.model.seen == [10, 10, 4]
    assert result.samples == SAMPLES


def test_an_error_that_is_none_of_memory_is_not_retried() -> None:
    accumulator = made()
    inputs, labels = batches(1)[0]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        accumulator.step_batch((inputs[:, :4], labels))
    assert accumulator.model.seen == [24]


def test_memory_that_runs_out_at_one_sample_is_told_as_it_is() -> None:
    accumulator = made(0)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        accumulator.step_batch(batches(1)[0])
    assert accumulator.model.seen[-1] == 1


def test_memory_that_runs_out_in_the_optimizer_s_step_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = made()

    def exhausted(group: Any, *_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(accumulator.optimizer, "_init_group", exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        accumulator.step_batch(batches(1)[0])
    assert accumulator.model.seen == [24]


@pytest.mark.parametrize(("most", "micro", "steps"), [(24, 24, 1), (12, 12, 2), (11, 6, 4), (3, 3, 8), (2, 1, 24)])
def test_the_largest_divisor_that_fits_keeps_the_effective_batch(most: int, micro: int, steps: int) -> None:
    accumulator = made(most)
    plan = fit_micro_batch(accumulator, batches(1)[0])
    assert (plan.micro_batch, plan.accum_steps, plan.effective_batch) == (micro, steps, SAMPLES)


def test_ranks_multiply_the_effective_batch() -> None:
    accumulator = made(6)
    plan = fit_micro_batch(accumulator, batches(1)[0], world_size=4)
    assert plan == BatchPlan(effective_batch=96, micro_batch=6, world_size=4)


@pytest.mark.parametrize("steps_before", [0, 3])
def test_trials_leave_everything_to_the_last_bit_as_it_was(steps_before: int) -> None:
    called: list[int] = []
    accumulator = made(7, after_step=[lambda model: called.append(1)], observer=Watching(called))
    for batch in batches(steps_before):
        accumulator.step_batch(batch, 6)
    torch.rand(3)
    before = whole_state(accumulator)
    fit_micro_batch(accumulator, batches(1)[0])
    assert_same_bits(before, whole_state(accumulator))
    assert len(called) == 2 * steps_before


def test_nothing_that_fits_is_refused_and_leaves_everything_as_it_was() -> None:
    accumulator = made(0)
    before = whole_state(accumulator)
    with pytest.raises(BatchError, match="not even a micro-batch of 1 fits in memory"):
        fit_micro_batch(accumulator, batches(1)[0])
    assert_same_bits(before, whole_state(accumulator))


def test_ranks_that_could_wait_for_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"fit_micro_batch runs in a group of 2 ranks"):
        fit_micro_batch(made(), batches(1)[0])
    with pytest.raises(ConfigError, match=r"step_batch\(batch, 'auto'\) runs in a group of 2 ranks"):
        made().step_batch(batches(1)[0])


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            True,
        ),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_errors_of_memory_are_told_from_others(error: BaseException, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one


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

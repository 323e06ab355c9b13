from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradaccum import Accumulator, Objective, Workload
from gradaccum.measurements.bench import Bench
from gradaccum.measurements.comparison import full_batch_step, scale_of, take_step
from gradaccum.measurements.setup import Setup
from tests.own_workload import regression


def test_the_scale_is_that_of_the_summed_magnitudes(setup: Setup) -> None:
    workload = Workload(
        name="opposed",  # two samples whose gradients cancel
        make_model=lambda: nn.Linear(1, 1, bias=False),
        objective=Objective(lambda model, batch: (model(torch.ones_like(batch)) * batch).sum(), len),
        train=torch.tensor([[3.0], [-3.0]]),
        validation=torch.tensor([[3.0]]),
        collate=torch.stack,
    )
    bench = Bench(workload, torch.device("cpu"), seed=0)
    settings = setup.optimizers.sgd
    window = bench.window([0, 1], [1, 1], torch.float64)
    scale = scale_of(bench, window, settings=settings, dtype=torch.float64)
    trace = take_step(
        bench,
        full_batch_step(workload.objective),
        bench.window([0, 1], [2], torch.float64),
        settings=settings,
        dtype=torch.float64,
    )
    assert trace.grad_norm == 0
    assert scale.gradient == pytest.approx(3.0)


def test_a_trace_holds_what_the_optimizer_found_and_left(setup: Setup) -> None:
    bench = Bench(regression(), torch.device("cpu"), seed=0)

    def step(model: nn.Module, optimizer: Optimizer, window: Sequence[Any]) -> Tensor:
        result = Accumulator(model, optimizer, bench.workload.objective).step(window)
        for parameter in model.parameters():
            parameter.grad = None
        return result.loss

    window = bench.window(range(6), [4, 2], torch.float64)
    before = dict(bench.model(torch.float64).named_parameters())
    trace = take_step(bench, step, window, settings=setup.optimizers.sgd, dtype=torch.float64)
    for name, parameter in trace.parameters.items():
        torch.testing.assert_close(parameter, before[name].detach() - 0.1 * trace.gradients[name])
    assert set(trace.state) == {"momentum_buffer"}
    assert trace.optimizer_steps == 1

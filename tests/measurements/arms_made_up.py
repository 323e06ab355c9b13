"""A small section, and arms that ended as a test says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gradaccum.engine.batching import BatchPlan
from gradaccum.engine.noise_scale import WindowNoise
from gradaccum.measurements.arms import ArmResult
from gradaccum.measurements.efficiency import Config
from gradaccum.measurements.equal_samples import Comparison
from gradaccum.measurements.setup import SGD
from gradaccum.measurements.training import Arm, Evaluation, Run


def config(**changes: Any) -> Config:
    given: dict[str, Any] = {
        "micro_batch": 4,
        "accum_steps": [1, 2, 8],
        "samples": 256,
        "seeds": [1, 2, 3],
        "optimizer": "sgd",
        "base_lr": 0.05,
        "base_effective_batch": 8,
        "scaling": "linear",
        "warmup_fraction": 0.5,
        "decay": "none",
        "beta2_rule": "fixed",
    }
    return Config(**{**given, **changes})


def arm(effective_batch: int, *, name: str = "sgd") -> Arm:
    return Arm(name, BatchPlan(effective_batch, 4), SGD(lr=0.1))


def run(*losses: float | None, diverged: int | None = None, noise: Sequence[WindowNoise] = ()) -> Run:
    """A run whose validation loss began at 2, and went on as given, 64 samples apart."""
    evaluations = [
        Evaluation(64 * at, 8 * at, None if at == 0 else loss, loss, None if loss is None else 0.5)
        for at, loss in enumerate([2.0, *losses])
    ]
    return Run((*evaluations[:-1], replace(evaluations[-1], noise=tuple(noise))), diverged)


def compared(**ends: Sequence[float | None]) -> Comparison:
    """Arms `b8=...` by what each seed ended with."""
    return Comparison(
        tuple(ArmResult(arm(int(name[1:])), tuple(run(1.0, end) for end in losses)) for name, losses in ends.items())
    )

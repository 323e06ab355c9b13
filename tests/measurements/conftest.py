from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gradaccum.config import shared
from gradaccum.measurements.setup import Setup


@pytest.fixture
def make_setup() -> Callable[..., Setup]:
    """A setup as params.yaml would give it, with top-level keys changed."""

    def make(workload: str = "digits", **changes: Any) -> Setup:
        params = {
            "seed": 7,
            "device": "cpu",
            "threads": 1,
            "workload": {"name": workload},
            "optimizers": {"sgd": {"lr": 0.1, "momentum": 0.9}, "adamw": {"lr": 1e-3, "weight_decay": 0.01}},
        }
        return shared({**params, **changes}, Setup)

    return make


@pytest.fixture
def setup(make_setup: Callable[..., Setup]) -> Setup:
    return make_setup()

"""What all stages might have measured, and the report of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradaccum.results.curve import Curve
from gradaccum.results.report import Measured, write_report
from tests.results.made_up_metrics import ARM, DIFFS, EFFICIENCY, KINDS, MISTAKE, RULED, SCALING, between, point

TIMES = {"median_step_ms": 2.0, "step_ms_low": 1.9, "step_ms_high": 2.2, "fitted_step_ms": 2.0}
RIGHT = {"grad_norm_ratio": 1.0, "param_diff_step1": 0.0, "diverged_at_step": None, "right_loop": None}
VISITS = {"rounds": 3, "disturbed_visits": 1}
THROUGHPUT = {"samples_per_sec": 10.0, "avg_loss": 0.5, "step_share": 0.5, **TIMES, **VISITS}


BYTES = {f"{kind}_bytes": 100 for kind in KINDS} | {"predicted_bytes": 600, "tally_bytes": 600}
BYTES |= {"process_bytes": 700, "device_bytes": None}
CANDIDATE = {"predicted_bytes": 600, "predicted_step_ms": 1.0, "fits": True, "chosen": True}
MEMORY = {"activation_bytes_per_sample": 2048.0, "max_prediction_error": 0.0, "max_growth_in_accum_steps": 0.0}
PLAN = {"micro_batch": 64, "accum_steps": 8, "world_size": 1, "predicted_bytes": 2048, "predicted_step_ms": 3.5}
OVER_RANKS = {"reduced_bytes": 1000, "median_step_ms": 2.0, "step_ms_low": 1.8, "step_ms_high": 2.2}


@pytest.fixture(scope="module")
def measured() -> Measured:
    return Measured(
        curves={
            "throughput": Curve("throughput", "effective_batch", tuple(point("sgd", n, **THROUGHPUT) for n in (1, 2))),
            "equivalence": Curve(
                "equivalence",
                "accum_steps",
                (point("sgd", 2, **DIFFS), point("sgd/uneven", 2, **DIFFS), point("control/undivided", 2, **DIFFS)),
            ),
            "ablation": Curve(
                "ablation",
                "accum_steps",
                (
                    point("sgd/scaled", 8, **RIGHT, final_loss=0.25),
                    point("sgd/scaled_clipped", 8, **RIGHT, final_loss=0.75),
                    point("sgd/naive", 8, **MISTAKE, right_loop="sgd/scaled"),
                    point("sgd/naive_clipped", 8, **MISTAKE, right_loop="sgd/scaled_clipped"),
                    point("sgd/mean_of_means", 8, **MISTAKE, right_loop="sgd/scaled_ragged"),
                ),
            ),
            "memory": Curve("memory", "accum_steps", tuple(point("sgd/micro_batch=4", n, **BYTES) for n in (1, 2))),
            "plan": Curve("plan", "accum_steps", tuple(point("candidates", n, **CANDIDATE) for n in (1, 2))),
            "efficiency": Curve("efficiency", "effective_batch", tuple(point("sgd", n, **ARM) for n in (1, 2))),
            "distributed": Curve(
                "distributed",
                "accum_steps",
                (point("ddp/last", 2, **OVER_RANKS), point("ddp/every", 2, **OVER_RANKS), point("ddp/last/uneven", 3)),
            ),
            "scaling": Curve(
                "scaling",
                "effective_batch",
                tuple(
                    {**point(f"{name}/{arm}", n, **ARM, **RULED), "effective_batch": 4 * n}
                    for name, arm in (("linear", "warm_up"), ("half_life", "half_life"))
                    for n in (1, 2)
                ),
            ),
        },
        metrics={
            "memory": MEMORY,
            "plan": PLAN,
            "equivalence": {"max_grad_diff": 3e-8, "max_grad_rel_diff_float64": 1e-16},
            "throughput": {
                "t_micro_ms": 0.17,
                "t_step_ms": 0.14,
                "max_rel_residual": 0.045,
                "peak_samples_per_sec": 24003.0,
                "flattens_at_effective_batch": 64,
                "flattens_at_effective_batch_low": 56.0,
                "flattens_at_effective_batch_high": 72.0,
            },
            "ablation": {},
            "efficiency": EFFICIENCY,
            "scaling": SCALING,
            "distributed": {"ddp/step_time_ratio": 2.5, "ddp/reduced_bytes_ratio": 16.0},
        },
        tables={
            "losses": [
                {"series": "sgd/scaled", "accum_steps": "8", "step": "1", "loss": "2.0"},
                {"series": "sgd/scaled", "accum_steps": "8", "step": "2", "loss": "1.0"},
                {"series": "sgd/naive", "accum_steps": "8", "step": "1", "loss": "2.0"},
                {"series": "sgd/naive", "accum_steps": "2", "step": "9", "loss": "9.0"},
            ],
            "learning": [
                {
                    "effective_batch": "8",
                    "samples": "0",
                    "steps": "0",
                    **between("validation_loss", ("2.3", "2.2", "2.4")),
                },
                {
                    "effective_batch": "8",
                    "samples": "64",
                    "steps": "8",
                    **between("validation_loss", ("0.5", "0.4", "0.6")),
                },
            ],
            "frontier": [
                {"effective_batch": "8", "micro_batch": micro, **{key: str(value) for key, value in TIMES.items()}}
                for micro in ("1", "8")
            ],
        },
        machine={"cpu": "Abacus 1", "gpu": None, "torch": "2.13.0", "python": "3.11.7"},
    )


@pytest.fixture(scope="module")
def report(measured: Measured, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report written once, for tests that read it."""
    root = tmp_path_factory.mktemp("report")
    write_report(measured, root)
    return root

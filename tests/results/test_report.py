from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradaccum.results import files
from gradaccum.results.curve import Curve
from gradaccum.results.files import ResultFileError
from gradaccum.results.report import Measured, write_report


def point(series: str, accum_steps: int, **fields: Any) -> dict[str, Any]:
    return {
        "series": series,
        "effective_batch": 8,
        "accum_steps": accum_steps,
        "micro_batch": 4,
        "world_size": 1,
        **fields,
    }


TIMES = {"median_step_ms": 2.0, "step_ms_low": 1.9, "step_ms_high": 2.2, "fitted_step_ms": 2.0}
DIFFS = {"grad_rel_diff_float64": 1e-16, "max_grad_diff": 0.0}
MISTAKE = {"grad_norm_ratio": 8.0, "param_diff_step1": 0.125, "final_loss": None, "diverged_at_step": 4}
RIGHT = {"grad_norm_ratio": 1.0, "param_diff_step1": 0.0, "final_loss": 0.25, "diverged_at_step": None}
THROUGHPUT = {"samples_per_sec": 10.0, "avg_loss": 0.5, **TIMES}


ARM = {
    "steps": 8,
    "lr": 0.05,
    "validation_loss": 0.5,
    "validation_loss_low": 0.4,
    "validation_loss_high": 0.6,
    "validation_accuracy": 0.9,
    "noise_scale": 30.0,
    "failed_runs": 0,
    "samples_to_target": 40.0,
}
EFFICIENCY = {
    "worth_it_up_to_effective_batch": 128,
    "worse_from_effective_batch": 256,
    "worse_from_failed_runs": 0,
    "target_loss": 0.2,
    "noise_scale": 30.0,
    "noise_scale_low": 20.0,
    "noise_scale_high": 45.0,
}
SCALING = {
    "linear/base_effective_batch": 16,
    "linear/unscaled/holds_up_to_times": 1,
    "linear/no_warm_up/holds_up_to_times": 2,
    "linear/warm_up/holds_up_to_times": 4,
    "linear/holds": True,
    "half_life/base_effective_batch": 64,
    "half_life/effective_batch": 4,
    "half_life/loss_above_base": -0.01,
    "half_life/loss_above_base_low": -0.05,
    "half_life/loss_above_base_high": 0.03,
    "half_life/loss_of_fixed_above_it": 0.02,
    "half_life/loss_of_fixed_above_it_low": 0.01,
    "half_life/loss_of_fixed_above_it_high": 0.03,
    "half_life/holds": True,
}
WITH_TABLE = ("throughput", "equivalence", "ablation", "memory", "plan", "efficiency", "worth")
KINDS = ("parameters", "gradients", "optimizer_state", "inputs", "activations", "temporaries")
BYTES = {f"{kind}_bytes": 100 for kind in KINDS} | {"predicted_bytes": 600, "tally_bytes": 600}
BYTES |= {"process_bytes": 700, "device_bytes": None}
CANDIDATE = {"predicted_bytes": 600, "predicted_step_ms": 1.0, "fits": True, "chosen": True}
MEMORY = {"activation_bytes_per_sample": 2048.0, "max_prediction_error": 0.0, "max_growth_in_accum_steps": 0.0}
PLAN = {"micro_batch": 64, "accum_steps": 8, "world_size": 1, "predicted_bytes": 2048, "predicted_step_ms": 3.5}
OVER_RANKS = {"reduced_bytes": 1000, "median_step_ms": 2.0}


@pytest.fixture
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
                "ablation", "accum_steps", (point("sgd/scaled", 8, **RIGHT), point("sgd/naive", 8, **MISTAKE))
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
                tuple(point(f"{name}/x", n, **ARM) for name in ("linear", "half_life") for n in (1, 2)),
            ),
        },
        metrics={
            "memory": MEMORY,
            "plan": PLAN,
            "equivalence": {"max_grad_diff": 3e-8, "max_grad_rel_diff_float64": 1e-16},
            "throughput": {
                "t_micro_ms": 0.17,
                "t_step_ms": 0.14,
                "peak_samples_per_sec": 24003.0,
                "flattens_at_effective_batch": 64,
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
                {"effective_batch": "8", "samples": "0", "steps": "0", "validation_loss": "2.3", "noise_scale": ""},
                {
                    "effective_batch": "8",
                    "samples": "64",
                    "steps": "8",
                    "validation_loss": "0.5",
                    "noise_scale": "30.0",
                },
            ],
            "frontier": [
                {"effective_batch": "8", "micro_batch": micro, **{key: str(value) for key, value in TIMES.items()}}
                for micro in ("1", "8")
            ],
        },
        machine={"cpu": "Abacus 1", "gpu": None, "torch": "2.13.0", "python": "3.11.7"},
    )


def test_the_report_writes_every_file_that_dvc_names(measured: Measured, tmp_path: Path) -> None:
    written = {str(path.relative_to(tmp_path)) for path in write_report(measured, tmp_path)}
    assert written == {
        "accum-curve.json",
        "skill-gradient-accumulation.md",
        "report/claims.md",
        *(f"report/distributed{name}" for name in (".png", "_bytes.csv", "_time.csv")),
        *(f"report/{name}.png" for name in ("noise_scale", "linear_scaling", "half_life")),
        *(f"report/{name}.{kind}" for name in WITH_TABLE for kind in ("csv", "png")),
    }
    assert (tmp_path / "report/throughput.png").read_bytes().startswith(b"\x89PNG")


def test_the_joined_curve_holds_the_main_series_of_every_stage(measured: Measured, tmp_path: Path) -> None:
    write_report(measured, tmp_path)
    points = {each["accum_steps"]: each for each in files.read_curve(tmp_path / "accum-curve.json").points}
    assert points[2]["samples_per_sec"] == 10.0
    assert points[2]["equivalence/grad_rel_diff_float64"] == 1e-16
    assert points[8]["ablation/grad_norm_ratio"] == 1.0


def test_the_recipe_shows_the_damage_as_measured(measured: Measured, tmp_path: Path) -> None:
    write_report(measured, tmp_path)
    page = (tmp_path / "skill-gradient-accumulation.md").read_text()
    assert "| naive: the loss is not divided | sgd | 8 | 0.12 | diverged at step 4 |" in page
    assert "sgd/scaled 0.25" in page
    assert "flattens at effective batch 64" in page
    assert "at N=16, a step took 2.5 times as long with ddp" in page
    assert "cpu Abacus 1, torch 2.13.0, python 3.11.7" in page
    assert len(page.splitlines()) < 80


def test_the_recipe_says_how_large_is_worth_it(measured: Measured, tmp_path: Path) -> None:
    write_report(measured, tmp_path)
    page = (tmp_path / "skill-gradient-accumulation.md").read_text()
    assert "From effective batch 8 to 64 larger is cheaper per sample, up to 128 it costs no quality: take 64" in page
    assert "noise scale is 30 targets (20 to 45)" in page
    assert "Loss 0.2 is reached soonest at effective batch 8: in 4 s, after 40 samples." in page


def test_the_page_of_claims_has_one_line_a_paper(measured: Measured, tmp_path: Path) -> None:
    write_report(measured, tmp_path)
    page = (tmp_path / "report/claims.md").read_text()
    assert [page.count(paper) for paper in ("1706.02677", "1812.06162", "2507.07101")] == [1, 1, 1]


def test_tables_are_wide_and_at_the_largest_n(measured: Measured, tmp_path: Path) -> None:
    write_report(measured, tmp_path)
    assert files.read_csv(tmp_path / "report/ablation.csv") == [
        {"step": "1", "sgd/scaled": "2.0", "sgd/naive": "2.0"},
        {"step": "2", "sgd/scaled": "1.0", "sgd/naive": ""},
    ]
    assert files.read_csv(tmp_path / "report/equivalence.csv") == [{"accum_steps": "2", "sgd": "1e-16"}]


def test_memory_is_told_by_kind_at_the_largest_n(measured: Measured, tmp_path: Path) -> None:
    write_report(measured, tmp_path)
    (row,) = files.read_csv(tmp_path / "report/memory.csv")
    assert row["predicted_bytes"] == "600"
    assert [row[f"{kind}_bytes"] for kind in KINDS] == ["100"] * 6


def test_the_recipe_says_what_it_takes_in_memory_and_what_to_set(measured: Measured, tmp_path: Path) -> None:
    write_report(measured, tmp_path)
    page = (tmp_path / "skill-gradient-accumulation.md").read_text()
    assert "Memory does not grow with N" in page
    assert "2 KiB of activations a sample" in page
    assert "micro_batch=64, accum_steps=8 (2 KiB, 3.5 ms a step)" in page


def test_ways_over_ranks_are_columns_without_what_was_not_timed(measured: Measured, tmp_path: Path) -> None:
    write_report(measured, tmp_path)
    rows = files.read_csv(tmp_path / "report/distributed_bytes.csv")
    assert rows == [{"accum_steps": "2", "ddp/last": "1000", "ddp/every": "1000"}]


def test_figures_are_the_same_each_time(measured: Measured, tmp_path: Path) -> None:
    for folder in ("one", "other"):
        write_report(measured, tmp_path / folder)
    for name in (*WITH_TABLE, "noise_scale", "linear_scaling", "half_life"):
        one, other = ((tmp_path / folder / f"report/{name}.png").read_bytes() for folder in ("one", "other"))
        assert one == other


def test_a_report_without_a_measurement_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ResultFileError, match="Run `dvc repro`"):
        Measured.read(tmp_path)

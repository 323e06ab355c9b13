from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradaccum.results import files
from gradaccum.results.curve import Curve
from gradaccum.results.files import ResultFileError
from gradaccum.results.report import Measured, write_report


def point(series: str, steps: int, **fields: Any) -> dict[str, Any]:
    return {"series": series, "effective_batch": 8, "accum_steps": steps, "micro_batch": 4, "world_size": 1, **fields}


TIMES = {"median_step_ms": 2.0, "step_ms_p25": 1.9, "step_ms_p75": 2.2, "fitted_step_ms": 2.0}
DIFFS = {"grad_rel_diff_float64": 1e-16, "max_grad_diff": 0.0}
MISTAKE = {"grad_norm_ratio": 8.0, "param_diff_step1": 0.125, "final_loss": None, "diverged_at_step": 4}
RIGHT = {"grad_norm_ratio": 1.0, "param_diff_step1": 0.0, "final_loss": 0.25, "diverged_at_step": None}
THROUGHPUT = {"samples_per_sec": 10.0, "avg_loss": 0.5, **TIMES}


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
        },
        metrics={
            "equivalence": {"max_grad_diff": 3e-8, "max_grad_rel_diff_float64": 1e-16},
            "throughput": {
                "t_micro_ms": 0.17,
                "t_step_ms": 0.14,
                "peak_samples_per_sec": 24003.0,
                "flattens_at_effective_batch": 64,
            },
            "ablation": {},
        },
        losses=[
            {"series": "sgd/scaled", "accum_steps": "8", "step": "1", "loss": "2.0"},
            {"series": "sgd/scaled", "accum_steps": "8", "step": "2", "loss": "1.0"},
            {"series": "sgd/naive", "accum_steps": "8", "step": "1", "loss": "2.0"},
            {"series": "sgd/naive", "accum_steps": "2", "step": "9", "loss": "9.0"},
        ],
        machine={"cpu": "Abacus 1", "gpu": None, "torch": "2.13.0", "python": "3.11.7"},
    )


def test_the_report_writes_every_file_that_dvc_names(measured: Measured, tmp_path: Path) -> None:
    written = {str(path.relative_to(tmp_path)) for path in write_report(measured, tmp_path)}
    assert written == {
        "accum-curve.json",
        "skill-gradient-accumulation.md",
        *(f"report/{stage}.{kind}" for stage in ("throughput", "equivalence", "ablation") for kind in ("csv", "png")),
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
    assert "cpu Abacus 1, torch 2.13.0, python 3.11.7" in page
    assert len(page.splitlines()) < 70


def test_tables_are_wide_and_at_the_largest_n(measured: Measured, tmp_path: Path) -> None:
    write_report(measured, tmp_path)
    assert files.read_csv(tmp_path / "report/ablation.csv") == [
        {"step": "1", "sgd/scaled": "2.0", "sgd/naive": "2.0"},
        {"step": "2", "sgd/scaled": "1.0", "sgd/naive": ""},
    ]
    assert files.read_csv(tmp_path / "report/equivalence.csv") == [{"accum_steps": "2", "sgd": "1e-16"}]


def test_figures_are_the_same_each_time(measured: Measured, tmp_path: Path) -> None:
    for folder in ("one", "other"):
        write_report(measured, tmp_path / folder)
    for name in ("throughput", "equivalence", "ablation"):
        one, other = ((tmp_path / folder / f"report/{name}.png").read_bytes() for folder in ("one", "other"))
        assert one == other


def test_a_report_without_a_measurement_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ResultFileError, match="Run `dvc repro`"):
        Measured.read(tmp_path)

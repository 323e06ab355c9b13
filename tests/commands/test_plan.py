from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gradaccum.commands.main import main

ROOT = Path(__file__).parents[2]
FRONTIER = """workload,optimizer,micro_batch,t_micro_ms,median_step_ms
digits,sgd,1,0.2,13.3
digits,sgd,64,0.4,0.9
"""
METRICS = '{"t_step_ms": 0.5, "flattens_at_effective_batch": 64, "extrapolation_error": null}'


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(*options: str) -> Result:
    return CliRunner().invoke(main, ["plan", *options], terminal_width=200)


def measured(project: Path) -> None:
    (project / "outputs/throughput").mkdir(parents=True)
    (project / "outputs/throughput/frontier.csv").write_text(FRONTIER)
    (project / "outputs/throughput/metrics.json").write_text(METRICS)


def test_it_proposes_with_the_times_that_were_measured_here(project: Path) -> None:
    measured(project)
    result = plan("--effective-batch", "128", "--memory", "1GiB")
    assert result.exit_code == 0, result.output
    assert "Set micro_batch=64, accum_steps=2, world_size=1: effective batch 128" in result.output
    assert "1.3 ms a step, 98 462 samples/s" in result.output
    assert "dvc exp run -S workload.name=digits -S throughput.micro_batch=64" in result.output


def test_the_table_fits_a_terminal_of_80_columns(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(project)
    monkeypatch.setenv("COLUMNS", "80")
    output = plan("--effective-batch", "128", "--memory", "1GiB").output
    table = output.partition("- Set micro_batch")[0].splitlines()
    assert max(map(len, table)) <= 80
    assert len(table) == 5 + 8  # title and head, and a line for each of 8 ways to cut 128: none is wrapped
    assert [line.split()[:2] for line in table[4:6]] == [["64", "2"], ["128", "1"]]


def test_it_proposes_without_any(project: Path) -> None:
    result = plan("--effective-batch", "64", "--memory", "1GiB", "--world-size", "2", "--workload", "digits_cnn")
    assert result.exit_code == 0, result.output
    assert "Set micro_batch=32, accum_steps=1, world_size=2" in result.output
    assert "No times of this workload were measured" in result.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--effective-batch", "510", "--memory", "8GiB", "--world-size", "4"), "Nearest that work: 508 or 512"),
        (("--effective-batch", "8", "--memory", "lots"), "'lots' is no amount of memory"),
        (("--effective-batch", "8", "--memory", "100KiB"), "no plan fits"),
        (("--effective-batch", "8", "--memory", "8"), "Did you mean 8GiB?"),
        (("--effective-batch", "8", "--memory", "0.5"), "Did you mean 0.5GiB?"),
        (("--effective-batch", "8", "--memory", "1GiB", "--workload", "imagenet"), "'imagenet' is unknown"),
    ],
)
def test_what_cannot_be_planned_is_said_without_a_traceback(project: Path, options: list[str], said: str) -> None:
    result = plan(*options)
    assert result.exit_code == 1
    assert said in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("number", ["0", "-4", "1.5", "1e3", "99999999999999999999"])
@pytest.mark.parametrize("option", ["--effective-batch", "--world-size"])
def test_a_number_that_cannot_be_one_names_its_option(project: Path, option: str, number: str) -> None:
    result = plan("--memory", "8GiB", "--effective-batch", "8", option, number)
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output


def test_help_imports_neither_torch_nor_mlflow_nor_pydantic() -> None:
    code = (
        "import sys\nfrom gradaccum.commands.main import main\n"
        "try: main(['plan', '--help'])\nexcept SystemExit: pass\n"
        "print({'torch', 'mlflow', 'pydantic', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "src")
    assert done.stdout.splitlines()[-1] == "set()"

"""The pipeline's blocks agree with the code: a dependency that is missing would serve stale results."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
BLOCKS: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
PARAMS = yaml.safe_load((ROOT / "params.yaml").read_text())
MORE_POSITIONAL = {
    ("comparison.py", "before_step"),  # these are called by torch
    ("limits.py", "_attention_backward"),
    ("tally.py", "__torch_dispatch__"),
    ("lower_precision.py", "__torch_dispatch__"),
    ("published.py", "run"),  # and this one is to take keywords
}
MEASURE_NOTHING = {"environment", "report", "track"}
SCRIPTS = {path.stem for path in (ROOT / "stages").glob("[a-z]*.py")}
MEASURING = sorted(SCRIPTS - MEASURE_NOTHING)


def imported(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def home(module: str) -> Path | None:
    base = SRC.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def closure(module: str) -> set[Path]:
    """Files of ours that importing a module may run, its parent packages included."""
    found: set[Path] = set()
    queue = [module]
    while queue:
        name = queue.pop()
        parents = [".".join(name.split(".")[:depth]) for depth in range(1, name.count(".") + 2)]
        for path in filter(None, map(home, parents)):
            if path not in found:
                found.add(path)
                lazy = path == SRC / "gradaccum/__init__.py"  # names what it could import, and imports nothing
                queue += [] if lazy else [each for each in imported(path) if each.startswith("gradaccum")]
    return found


def built_in_workloads() -> set[Path]:
    """Chosen by name, so that no import statement shows them."""
    names = {path.stem for path in (SRC / "gradaccum/workloads").glob("*.py")}
    return set().union(*(closure(f"gradaccum.workloads.{name}") for name in names))


@pytest.mark.parametrize("stage", MEASURING)
def test_a_measuring_stage_has_its_section_measurement_block_and_test(stage: str) -> None:
    assert stage in PARAMS
    assert home(f"gradaccum.measurements.{stage}")
    assert stage in BLOCKS
    assert (ROOT / f"tests/measurements/test_{stage}.py").is_file()
    assert BLOCKS[stage]["cmd"].endswith(f"stages/{stage}.py")
    assert any(stage in str(param) for param in BLOCKS[stage]["params"])


def test_every_block_has_its_script() -> None:
    assert set(BLOCKS) == SCRIPTS


@pytest.mark.parametrize("stage", MEASURING)
def test_a_stage_depends_on_every_file_of_its_measurement(stage: str) -> None:
    deps = [ROOT / dep for dep in BLOCKS[stage]["deps"]]
    for dep in deps:
        assert dep.exists() or dep.is_relative_to(ROOT / "outputs"), f"{dep} does not exist"
    needed = closure(f"gradaccum.measurements.{stage}") | built_in_workloads() | {ROOT / f"stages/{stage}.py"}
    missing = {path for path in needed if not any(path == dep or path.is_relative_to(dep) for dep in deps)}
    assert not missing


@pytest.mark.parametrize("stage", MEASURING)
def test_changing_how_results_are_written_drawn_or_logged_measures_nothing_again(stage: str) -> None:
    for file in ("results/files.py", "results/figures.py", "tracking/stage_run.py", "config.py"):
        path = SRC / "gradaccum" / file
        assert not any(path == ROOT / dep or path.is_relative_to(ROOT / dep) for dep in BLOCKS[stage]["deps"])


@pytest.mark.parametrize("stage", MEASURING)
def test_a_stage_lists_the_packages_that_decide_its_results(stage: str) -> None:
    (keys,) = (p["outputs/environment.json"] for p in BLOCKS[stage]["params"] if isinstance(p, dict))
    assert {"torch", "numpy", "scikit_learn", "workload_source"} <= set(keys)


@pytest.mark.parametrize("stage", sorted(SCRIPTS))
def test_a_stage_script_is_thin(stage: str) -> None:
    assert len((ROOT / f"stages/{stage}.py").read_text().splitlines()) <= 40


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda path: str(path.relative_to(SRC)))
def test_a_file_stays_small(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert len(path.read_text().splitlines()) <= 250
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 40, node.name
            positional = {each.arg for each in [*node.args.posonlyargs, *node.args.args]} - {"self", "cls"}
            assert len(positional) <= 3 or (path.name, node.name) in MORE_POSITIONAL, node.name


def test_no_script_hides_a_module_of_the_standard_library() -> None:
    assert not SCRIPTS & set(sys.stdlib_module_names)


@pytest.mark.parametrize(
    "module",
    ["gradaccum", "gradaccum.tracking.stage_run", *(f"gradaccum.measurements.{stage}" for stage in MEASURING)],
)
def test_importing_needs_neither_torch_nor_mlflow(module: str) -> None:
    code = f"import sys, {module}; sys.exit(' '.join({{'torch', 'mlflow', 'matplotlib'}} & set(sys.modules)) or 0)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there() -> None:
    import gradaccum

    for name in gradaccum.__all__:
        assert getattr(gradaccum, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = gradaccum.nothing

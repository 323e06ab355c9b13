"""The committed numbers are those of the committed code: dvc.lock has the hashes of the files that are here."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
import yaml

from gradaccum.tracking.lockfile import LockedStage, read_pipeline

ROOT = Path(__file__).parents[1]
MADE = "outputs/"
STAGES = read_pipeline(ROOT).stages


def in_git(folder: str) -> list[str]:
    done = subprocess.run(["git", "ls-files", "--", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(path.removeprefix(f"{folder}/") for path in done.stdout.splitlines())


def digest(path: str) -> str:
    """As DVC has it: of a folder, the md5 of the list of its files."""
    if (ROOT / path).is_file():
        return hashlib.md5((ROOT / path).read_bytes()).hexdigest()
    entries = [{"md5": digest(f"{path}/{name}"), "relpath": name} for name in in_git(path)]
    return hashlib.md5(json.dumps(entries, sort_keys=True).encode()).hexdigest() + ".dir"


def test_every_dependency_that_dvc_yaml_names_was_there() -> None:
    named = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    assert {name: set(stage.deps) for name, stage in STAGES.items()} == {
        name: set(stage.get("deps", [])) for name, stage in named.items()
    }, "run `dvc repro` and commit dvc.lock and the metrics"


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_what_a_stage_was_measured_with_is_what_is_here(stage: LockedStage) -> None:
    sources = {path: locked for path, locked in stage.deps.items() if not path.startswith(MADE)}
    older = [path for path, locked in sources.items() if digest(path) != locked]
    assert older == [], "run `dvc repro` and commit dvc.lock and the metrics"

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from gradaccum.results import files
from gradaccum.results.curve import Curve
from gradaccum.results.files import ResultFileError
from gradaccum.results.outcome import Outcome

POINT = {"series": "a", "effective_batch": 8, "accum_steps": 2, "micro_batch": 4, "world_size": 1}


def test_an_outcome_becomes_the_files_of_its_stage(tmp_path: Path) -> None:
    outcome = Outcome({"b": 1.5, "a": None}, Curve("x", "accum_steps", (POINT,)), [], tables={"steps": [{"loss": 0.5}]})
    paths = files.write_outcome(outcome, tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in paths] == [
        "x/metrics.json",
        "x/accum-curve.json",
        "x/steps.csv",
    ]
    assert list(json.loads(paths[0].read_text())) == ["a", "b"]
    assert files.read_curve(paths[1]) == outcome.curve
    assert files.read_csv(paths[2]) == [{"loss": "0.5"}]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_and_leaves_no_file(tmp_path: Path, bad: float) -> None:
    with pytest.raises(ResultFileError, match="not finite"):
        files.write_json(tmp_path / "metrics.json", {"loss": bad})
    with pytest.raises(ResultFileError, match="not finite"):
        files.write_csv(tmp_path / "steps.csv", [{"loss": bad}])
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = files.write_text(tmp_path / "metrics.json", "old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ResultFileError, match=r"metrics\.json cannot be written: disk full\. Make room"):
        files.write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_or_broken_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ResultFileError, match=r"is missing\. Run `dvc repro`"):
        files.read_json(tmp_path / "metrics.json")
    (tmp_path / "metrics.json").write_text("{")
    with pytest.raises(ResultFileError, match="is no JSON"):
        files.read_json(tmp_path / "metrics.json")
    (tmp_path / "metrics.json").write_text("[]")
    with pytest.raises(ResultFileError, match="holds a list"):
        files.read_json(tmp_path / "metrics.json")
    with pytest.raises(ResultFileError, match="is missing"):
        files.read_csv(tmp_path / "steps.csv")


def test_a_folder_that_cannot_be_made_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("a file")
    with pytest.raises(ResultFileError, match=r"cannot be written: .*git checkout \. && dvc checkout --force"):
        files.write_text(tmp_path / "outputs" / "metrics.json", "{}")


def test_files_are_readable_as_the_users_umask_says(tmp_path: Path) -> None:
    os.umask(mask := os.umask(0o022))
    path = files.write_text(tmp_path / "metrics.json", "{}")
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gradaccum.errors import ConfigError
from gradaccum.workloads.factory import Factory

FILE = """\
raise RuntimeError("imported")

from elsewhere import third

def tiny(hidden: int = 32, *, rate: float = 0.1):
    pass

def needs(samples, /, *rest):
    pass

def anything(**options):
    pass

@decorated
def wrapped():
    pass

if True:
    later = tiny
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's root, with `model_of_mine.py` in it, which no check may import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "model_of_mine.py").write_text(FILE)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tiny", {}),
        ("tiny", {"hidden": 3, "rate": 0.5}),
        ("anything", {"goes": 1}),
        ("wrapped", {"unknown": "what a decorator takes"}),
        ("third", {"unknown": "what another file holds"}),
        ("later", {"unknown": "what only running tells"}),
    ],
)
def test_what_may_be_right_passes_without_an_import(name: str, options: dict[str, object]) -> None:
    Factory("model_of_mine", name).check(options)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("nothing", {}, "workload.name = 'model_of_mine:nothing': model_of_mine has no 'nothing'. Correct the name."),
        ("tiny", {"wrong": 3}, r"workload.tiny = \{'wrong': 3\} .*tiny\(hidden=32, \*, rate=0.1\): .*'wrong'"),
        (
            "needs",
            {},
            r"model_of_mine.needs\(samples, /, \*rest\): missing a required .*'samples'. Correct the options",
        ),
    ],
)
def test_what_cannot_be_right_is_refused_without_an_import(name: str, options: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Factory("model_of_mine", name).check(options)


def test_a_file_that_is_no_python_is_told_with_its_line(folder: Path) -> None:
    (folder / "model_of_mine.py").write_text("x = 1\ndef tiny(:\n")
    with pytest.raises(ConfigError, match=r"model_of_mine\.py, line 2: invalid syntax"):
        Factory("model_of_mine", "tiny").check({})


def test_a_name_that_only_running_binds_is_left_to_running(folder: Path) -> None:
    (folder / "model_of_mine.py").write_text("from elsewhere import *\n")
    Factory("model_of_mine", "tiny").check({})


def test_options_that_only_running_tells_to_be_wrong_are_refused_then(folder: Path) -> None:
    (folder / "model_that_runs.py").write_text("later = lambda hidden=3: hidden\n")
    factory = Factory("model_that_runs", "later")
    factory.check({"wrong": 3})
    assert factory.make({"hidden": 5}) == 5
    with pytest.raises(ConfigError, match=r"model_that_runs\.later\(hidden=3\): got an unexpected .*'wrong'"):
        factory.make({"wrong": 3})

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from gradaccum import machine
from gradaccum.errors import ConfigError


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without a GPU, whose torch could use one."""
    monkeypatch.setattr(machine, "_version", lambda package: "2.13.0")
    monkeypatch.setattr(machine, "_gpu", lambda: None)
    monkeypatch.setattr(machine, "DRIVERS", ())
    return monkeypatch


def test_cuda_is_refused_where_no_gpu_shows(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"device = .cuda., but this machine shows no GPU\. Set device to auto or cpu"
    ):
        machine.require_cuda()


def test_cuda_is_refused_by_a_torch_for_cpus(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(machine, "_gpu", lambda: "H200")
    bare.setattr(machine, "_version", lambda package: "2.13.0+cpu")
    with pytest.raises(ConfigError, match=r"torch 2\.13\.0\+cpu is a build for CPUs"):
        machine.require_cuda()


@pytest.mark.parametrize(
    ("gpu", "driver", "refused"), [("H200", False, False), (None, True, False), (None, False, True)]
)
def test_a_driver_or_a_named_gpu_is_enough(
    gpu: str | None, driver: bool, refused: bool, bare: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bare.setattr(machine, "_gpu", lambda: gpu)
    bare.setattr(machine, "DRIVERS", (str(tmp_path),) if driver else ())
    with pytest.raises(ConfigError) if refused else nullcontext() as error:
        machine.require_cuda()
    assert (error is not None) is refused

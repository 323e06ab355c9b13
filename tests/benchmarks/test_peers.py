from __future__ import annotations

import runpy
import sys

import pytest


@pytest.mark.parametrize("library", ["accelerate", "lightning"])
def test_without_a_peer_s_library_it_is_said_what_to_install(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("accelerate", "lightning"):
        monkeypatch.setitem(sys.modules, name, None if name == library else sys)
    with pytest.raises(SystemExit, match=rf"{library} is not installed: pip install -e '\.\[peers\]'"):
        runpy.run_module("benchmarks.peers", run_name="__main__")

"""What every stage starts with, run in a process of its own: how it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STAGES = Path(__file__).parents[2] / "stages"


@pytest.mark.parametrize(
    ("raised", "code", "told"),
    [
        ("KeyboardInterrupt", 130, "Interrupted. Outputs that DVC removed come back with"),
        ("ConfigError('workload a:b:c')", 1, "workload a:b:c"),
    ],
)
def test_what_stops_a_stage_is_told_as_it_is_without_a_traceback(raised: str, code: int, told: str) -> None:
    script = (
        "from _start import user_errors\nfrom gradaccum.errors import ConfigError\n"
        f"with user_errors():\n    raise {raised}"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=STAGES, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.startswith(told)
    assert "Traceback" not in done.stderr

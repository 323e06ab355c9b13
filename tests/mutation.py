"""Breaks the engine on purpose, one small way at a time, and requires a named test to notice.

torch is imported once, and every mutant is tried in a fork. A harmless mutant comes first, and must survive: a test
that fails whatever the engine does notices nothing.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from tests.mutants import Mutant

ROOT = Path(__file__).parents[1]
CAUGHT = pytest.ExitCode.TESTS_FAILED


def try_all(harmless: Mutant, mutants: Sequence[Mutant]) -> NoReturn:
    """Exit with 1 where a mutant survives."""
    import torch
    import torch._dynamo  # which the first optimizer would import in every fork

    torch.set_num_threads(1)
    if not survivors([harmless]):
        raise SystemExit(f"{harmless.test} fails on the engine as it is, so it cannot notice a mutant. Mend it first.")
    alive = survivors(mutants)
    print(f"{len(mutants) - len(alive)} of {len(mutants)} mutants caught", *alive, sep="\n")
    raise SystemExit(bool(alive))


def survivors(mutants: Sequence[Mutant]) -> list[str]:
    """Names of the mutants that no test noticed, with what happened instead."""
    found = []
    for mutant in mutants:
        code = _in_a_fork(mutant)
        if code != CAUGHT:
            found.append(f"{mutant.name}: {mutant.test} ended with {code}")
    return found


def _in_a_fork(mutant: Mutant) -> int:
    with tempfile.TemporaryDirectory() as folder:
        broken = Path(folder)
        shutil.copytree(ROOT / "src", broken / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        shutil.copytree(ROOT / "tests", broken / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", broken)
        source = broken / mutant.file
        before = source.read_text()
        if before.count(mutant.text) != 1:
            raise SystemExit(
                f"{mutant.name}: {mutant.file} holds its text {before.count(mutant.text)} times, not once."
            )
        source.write_text(before.replace(mutant.text, mutant.broken))
        child = os.fork()
        if not child:
            os._exit(_run(broken, mutant.test))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _run(folder: Path, test: str) -> int:
    os.chdir(folder)
    sys.path[:0] = [str(folder / "src"), str(folder)]
    os.environ["PYTHONPATH"] = f"{folder / 'src'}:{folder}"
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(folder / test)]))

"""What every stage starts with: this folder's own code, and errors without tracebacks.

A queued experiment runs in a snapshot of the repository, in another folder; with an editable install it would otherwise
run the main checkout's code, edited since.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from rich.console import Console

from gradaccum.errors import GradaccumError, RankError


@contextmanager
def user_errors() -> Iterator[None]:
    """Exit with 1 and the message alone where it is one that the user can act on."""
    try:
        yield
    except GradaccumError as error:
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        lost = " Outputs that DVC removed come back with `git checkout . && dvc checkout --force`."
        message = f"{rank}{error}{lost if isinstance(error, RankError) else ''}"
        Console(stderr=True, soft_wrap=True, highlight=False).print(message, style="bold red", markup=False)
        sys.exit(1)

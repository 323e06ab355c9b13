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

LOST = " Outputs that DVC removed come back with `git checkout . && dvc checkout --force`."


@contextmanager
def user_errors() -> Iterator[None]:
    """Exit with 1 and the message alone where it is one that the user can act on; with 130 after Ctrl-C."""
    try:
        yield
    except GradaccumError as error:
        _say(f"{error}{LOST if isinstance(error, RankError) else ''}")
        sys.exit(1)
    except KeyboardInterrupt:
        _say(f"Interrupted.{LOST}")
        sys.exit(130)


def _say(message: str) -> None:
    rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    console = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
    console.print(f"{rank}{message}", style="bold red", markup=False)

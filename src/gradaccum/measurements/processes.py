"""Processes of their own for what needs one, forked from a process that has torch loaded."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from types import ModuleType

PRELOADED = ["torch", "torch._dynamo", "torch._subclasses.fake_tensor", "sklearn.datasets", "pydantic"]
"""What takes long to import (an optimizer's first step does the second). Other people's packages only: the server does
not know which folder's code its parent runs, each fork does."""


@contextmanager
def own_processes() -> Iterator[Executor]:
    """An executor that runs each task in a new process, one after another.

    A process that the system kills raises `concurrent.futures.process.BrokenProcessPool`, and the executor is done for.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with _main_hidden(), ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as executor:
        yield executor


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Let no new process run the main script's imports again, which take longer than most tasks."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main

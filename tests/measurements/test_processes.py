from __future__ import annotations

import os
import signal
import sys
from concurrent.futures.process import BrokenProcessPool

import pytest

import gradaccum
from gradaccum.measurements.processes import own_processes


def where_our_code_is() -> str | None:
    return gradaccum.__file__


def test_each_task_has_a_process_of_its_own_with_this_process_s_code() -> None:
    with own_processes() as processes:
        pids = {processes.submit(os.getpid).result() for _ in range(3)}
        code = processes.submit(where_our_code_is).result()
    assert len(pids) == 3
    assert os.getpid() not in pids
    assert code == where_our_code_is()


def test_an_error_comes_back_as_itself() -> None:
    with own_processes() as processes, pytest.raises(ZeroDivisionError):
        processes.submit(divmod, 1, 0).result()


def test_a_killed_process_is_told_and_not_waited_for() -> None:
    with own_processes() as processes, pytest.raises(BrokenProcessPool):
        processes.submit(signal.raise_signal, signal.SIGKILL).result()


def test_the_main_module_is_back_afterwards() -> None:
    main = sys.modules["__main__"]
    with own_processes():
        assert sys.modules["__main__"] is not main
    assert sys.modules["__main__"] is main

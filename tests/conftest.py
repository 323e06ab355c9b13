"""Every test starts from a clean environment: no inherited DVC stage, no inherited tracker, one thread."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from tests.distributed.pool import Pool

INHERITED = ("DVC_", "MLFLOW_", "GRADACCUM_", "GIT_")

for name in [name for name in os.environ if name.startswith(INHERITED)]:
    del os.environ[name]
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start


def pytest_configure() -> None:
    """Ctrl-C reaches what tests start, though a shell that ran the suite in its background had it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_thread_and_one_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """`ranks(world_size, function, *args)` runs an importable function on real ranks."""
    pool = Pool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.distributed)

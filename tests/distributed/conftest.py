from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


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
            item.add_marker(pytest.mark.xdist_group("ranks"))  # one pool for all

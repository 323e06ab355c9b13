"""Bytes between two hosts, as the interface counts them: syncing on the last of N micro-batches sends N times fewer."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import two_hosts

pytestmark = pytest.mark.distributed

REASON = two_hosts.why_not()
HEADERS = 0.12
"""Largest share of headers and of the two small exchanges, for a gradient of half a megabyte."""


@pytest.fixture(scope="module")
def points() -> dict[tuple[int, str], dict[str, Any]]:
    if REASON:
        pytest.skip(f"two hosts cannot be set up: {REASON}")
    found = two_hosts.measure("1gbit", [1, 4], hidden=1024, steps=3)
    return {(point["accum_steps"], point["sync"]): point for point in found}


def test_a_reduction_sends_one_gradient_over_the_link(points: dict[tuple[int, str], dict[str, Any]]) -> None:
    """2 (W - 1) / W of it on each of W = 2 hosts."""
    for accum_steps, sync in ((1, "last"), (1, "every"), (4, "last")):
        point = points[accum_steps, sync]
        assert point["reduced_bytes"] == point["gradient_bytes"]
        assert 1 <= point["sent_bytes"] / point["gradient_bytes"] <= 1 + HEADERS


def test_syncing_last_sends_n_times_fewer_bytes(points: dict[tuple[int, str], dict[str, Any]]) -> None:
    last, every = points[4, "last"], points[4, "every"]
    assert every["reduced_bytes"] == 4 * last["reduced_bytes"]
    assert every["sent_bytes"] / last["sent_bytes"] == pytest.approx(4, rel=0.1)


def test_nothing_is_left_behind(points: dict[tuple[int, str], dict[str, Any]]) -> None:
    assert points
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"ga-{two_hosts.os.getpid() % 100000}-" not in left


def test_a_prediction_from_short_windows_knows_nothing_of_long_ones() -> None:
    """T = 2 N + 30 syncs + 5, and a longer window that took twice as long."""
    points = [
        {"accum_steps": n, "sync_calls": syncs, "step_ms": (2 * n + 30 * syncs + 5) * (2 if n > 2 else 1)}
        for n in (1, 2, 8)
        for syncs in {1, n}
    ]
    fit = two_hosts.predict(points, fitted_up_to=2)
    assert fit.step_ms(8, 8) == pytest.approx(2 * 8 + 30 * 8 + 5)


def test_a_rendezvous_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
                *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-conf=is_host=1,timeout=5", "x.py"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    print(done.stderr)
    assert "address already in use" in done.stderr.lower()

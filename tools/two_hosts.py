"""Two hosts on one machine: network namespaces joined by a link of limited rate, and a real two-node torchrun over it.

    sudo python tools/two_hosts.py

Shows what gradient sync costs where it is slow: bytes as the interface counts them, and step times beside those that
`T = N * t_micro + n_sync * t_sync + t_step` predicts from shorter windows. Needs Linux, root, and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from gradaccum.results.sync_fit import SyncTimeFit, fit_sync_time

WORKER = Path(__file__).with_name("two_hosts_worker.py")
PORT = 29400
TIMEOUT_S = 300


class TwoHostsError(RuntimeError):
    """The hosts cannot be set up, or their run failed."""


@dataclass(frozen=True)
class Host:
    """A network namespace with one interface on the link."""

    name: str
    interface: str
    address: str

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]


def why_not() -> str | None:
    """What this machine lacks; None where it lacks nothing."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, and this is {sys.platform}"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 are not installed"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    name = f"gradaccum-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "root may not make network namespaces here (a container, perhaps)"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TwoHostsError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")


@contextmanager
def two_hosts(rate: str) -> Iterator[tuple[Host, Host]]:
    """Two namespaces with a veth pair between them, each end sending at no more than `rate` (as tc writes it)."""
    tag = f"{os.getpid() % 100000}"
    hosts = (Host(f"ga-{tag}-a", f"va{tag}", "10.213.0.1"), Host(f"ga-{tag}-b", f"vb{tag}", "10.213.0.2"))
    with ExitStack() as stack:
        for host in hosts:
            run("ip", "netns", "add", host.name)
            stack.callback(run, "ip", "netns", "delete", host.name)  # takes its end of the link with it
        run("ip", "link", "add", hosts[0].interface, "type", "veth", "peer", "name", hosts[1].interface)
        for host in hosts:
            run("ip", "link", "set", host.interface, "netns", host.name)
            run(*host.command("ip", "address", "add", f"{host.address}/24", "dev", host.interface))
            run(*host.command("ip", "link", "set", host.interface, "up"))
            run(*host.command("ip", "link", "set", "lo", "up"))
            limit = ["rate", rate, "burst", "64kb", "latency", "400ms"]
            run(*host.command("tc", "qdisc", "add", "dev", host.interface, "root", "tbf", *limit))
        yield hosts


def torchrun(host: Host, rank: int, endpoint: str, arguments: Sequence[str]) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=two-hosts", f"--node-rank={rank}"]
    meeting.append(f"--rdzv-conf=is_host={int(rank == 0)}")  # names of this machine mean nothing in a namespace
    return host.command(
        *launcher, *meeting, f"--local-addr={host.address}", str(WORKER), f"--interface={host.interface}", *arguments
    )


def measure(rate: str, accum_steps: Sequence[int], hidden: int, steps: int) -> list[dict[str, Any]]:
    """Every point, as rank 0 saw it.

    Raises:
        TwoHostsError: with what the host that failed printed last.
    """
    with two_hosts(rate) as hosts, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "points.json"
        arguments = ["--accum-steps", *map(str, accum_steps), "--hidden", str(hidden), "--steps", str(steps)]
        endpoint = f"{hosts[0].address}:{PORT}"
        launched = [
            subprocess.Popen(
                torchrun(host, rank, endpoint, [*arguments, "--out", str(out)]),
                env={**os.environ, "GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1", **OURS},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate(hosts)
        ]
        wait_for(launched)
        points: list[dict[str, Any]] = json.loads(out.read_text())
        return points


OURS = {"PYTHONPATH": str(Path(__file__).resolve().parents[1] / "src")}


def wait_for(launched: Sequence[subprocess.Popen[str]]) -> None:
    try:
        errors = [process.communicate(timeout=TIMEOUT_S)[1] for process in launched]
    except subprocess.TimeoutExpired as error:
        raise TwoHostsError(f"the hosts did not end within {TIMEOUT_S} s.") from error
    finally:
        for process in launched:
            process.kill()
            process.wait()
    for number, (process, error_text) in enumerate(zip(launched, errors, strict=True)):
        if process.returncode:
            raise TwoHostsError(f"host {number} failed:\n" + "\n".join(error_text.splitlines()[-25:]))


def predict(points: Sequence[dict[str, Any]], fitted_up_to: int) -> SyncTimeFit:
    """The model, from the shorter windows only."""
    short = [point for point in points if point["accum_steps"] <= fitted_up_to]
    return fit_sync_time(*([point[key] for point in short] for key in ("accum_steps", "sync_calls", "step_ms")))


def show(points: Sequence[dict[str, Any]], fitted_up_to: int, rate: str) -> None:
    fit = predict(points, fitted_up_to)
    table = Table(title=f"two hosts, {rate}", title_justify="left")
    for name in ("N", "sync", "reductions", "sent kB", "of one gradient", "step ms", "predicted ms"):
        table.add_column(name, justify="right")
    for point in points:
        predicted = fit.step_ms(point["accum_steps"], point["sync_calls"])
        table.add_row(
            str(point["accum_steps"]),
            point["sync"],
            str(point["reductions"]),
            f"{point['sent_bytes'] / 1000:.0f}",
            f"{point['sent_bytes'] / point['gradient_bytes']:.2f}",
            f"{point['step_ms']:.1f}",
            f"{predicted:.1f}" + ("" if point["accum_steps"] > fitted_up_to else " (fitted)"),
        )
    console = Console(width=100, highlight=False)
    console.print(table)
    console.print(
        f"step time = N x {fit.t_micro_ms:.3g} ms + syncs x {fit.t_sync_ms:.3g} ms + {fit.t_step_ms:.3g} ms, "
        f"from windows of up to {fitted_up_to}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit", help="of the link, as tc writes it")
    parser.add_argument("--accum-steps", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--fitted-up-to", type=int, default=2, help="longest window that the prediction may know")
    parser.add_argument("--hidden", type=int, default=4096, help="size of the model: about 129 parameters each")
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(f"Two hosts cannot be set up: {reason}.")
    try:
        points = measure(options.rate, options.accum_steps, options.hidden, options.steps)
    except TwoHostsError as error:
        sys.exit(str(error))
    show(points, options.fitted_up_to, options.rate)


if __name__ == "__main__":
    main()

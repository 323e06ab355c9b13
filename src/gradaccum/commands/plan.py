"""`gradaccum plan`: what to set for a target effective batch and a memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from gradaccum.results.step_costs import StepCosts

SAMPLES = click.IntRange(1, 2**30)


@click.command()
@click.option("--effective-batch", required=True, type=SAMPLES, help="Samples of an optimizer step, over all ranks.")
@click.option("--memory", required=True, help="What each rank has: 8GiB, 24GB, 512MiB.")
@click.option("--world-size", default=1, show_default=True, type=SAMPLES, help="Data-parallel ranks.")
@click.option("--workload", help="As workload.name in params.yaml, which is the default.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda", show_default=True, help="Of the memory.")
def plan(*, effective_batch: int, memory: str, world_size: int, workload: str | None, device: str) -> None:
    """Propose micro-batch and accumulation steps, with predicted memory, time and reasons.

    Memory is predicted without running; times are those that the throughput stage measured last. Run it in the
    project's root.
    """
    from rich.console import Console  # noqa: PLC0415 (takes as long as all of --help may)

    from gradaccum.config import read_params, section, shared  # noqa: PLC0415 - likewise
    from gradaccum.measurements.plan import Config, measure  # noqa: PLC0415 - likewise
    from gradaccum.measurements.setup import Setup  # noqa: PLC0415 - likewise
    from gradaccum.results.sizes import parse_bytes  # noqa: PLC0415 - likewise
    from gradaccum.results.terminal import show  # noqa: PLC0415 - likewise
    from gradaccum.workloads.choice import WorkloadChoice  # noqa: PLC0415 - likewise

    asked = {
        "target_effective_batch": effective_batch,
        "memory_bytes": parse_bytes(memory),
        "memory_device": device,
        "world_size": world_size,
    }
    config = section({"plan": asked}, "plan", Config, file=Path("command line"))
    params = read_params()
    setup = shared(params, Setup)
    if workload:
        setup = replace(setup, workload=WorkloadChoice.parse({**params["workload"], "name": workload}))
    show(measure(config, setup, costs=measured_costs()), Console(highlight=False, emoji=False))


def measured_costs() -> StepCosts | None:
    """What the throughput stage wrote, if it has run here."""
    from gradaccum.results.files import OUTPUTS, ResultFileError, read_csv, read_json  # noqa: PLC0415 - likewise
    from gradaccum.results.step_costs import StepCosts  # noqa: PLC0415 - likewise

    try:
        return StepCosts.of(
            read_csv(OUTPUTS / "throughput" / "frontier.csv"), read_json(OUTPUTS / "throughput" / "metrics.json")
        )
    except ResultFileError:
        return None

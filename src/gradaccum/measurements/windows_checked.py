"""The memory measurement's computation: every window predicted, then run in a process of its own."""

from __future__ import annotations

from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool

import psutil
import torch

from gradaccum.engine.fitting import is_out_of_memory
from gradaccum.errors import ConfigError
from gradaccum.measurements.bench import Bench
from gradaccum.measurements.memory import Config
from gradaccum.measurements.memory_results import Checked, outcome
from gradaccum.measurements.processes import own_processes
from gradaccum.measurements.setup import Progress, Setup
from gradaccum.measurements.tally import Peak
from gradaccum.measurements.window_memory import Seen, Window, observe, predict
from gradaccum.results.outcome import Outcome
from gradaccum.results.sizes import HEADROOM, shown_bytes

LARGEST = 2**24
"""Where the search for the largest micro-batch ends."""

SMALLER = (
    "Leave that size out of memory.micro_batch: what fits in budget_bytes is predicted for any size, and runs nothing."
)


def check_windows(config: Config, setup: Setup, progress: Progress) -> Outcome:
    """See `gradaccum.measurements.memory.measure`."""
    bench = Bench.prepare(setup)
    settings = setup.optimizers.settings(config.optimizer)
    windows = [
        Window(micro, steps, settings, config.precision) for micro in config.micro_batch for steps in config.accum_steps
    ]
    predicted = {window: predict(bench, window) for window in progress(windows, "memory, predicted")}
    for window, peak in predicted.items():
        require_room(window, peak, room=free_bytes(bench.device))
    with own_processes() as processes:
        checked = [
            Checked(window, predicted[window], run(processes, setup, window)) for window in progress(windows, "memory")
        ]
    return outcome(checked, config, largest_in_budget(bench, config, setup))


def free_bytes(device: torch.device) -> int:
    """What the device, or on the CPU the system, could still give."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def require_room(window: Window, peak: Peak, *, room: int) -> None:
    """Refuse to run what is predicted not to fit."""
    if peak.total > room:
        raise ConfigError(
            f"memory: micro_batch={window.micro_batch}, accum_steps={window.accum_steps} would take "
            f"{shown_bytes(peak.total)}, and {shown_bytes(room)} are free here, so that it cannot be run to check the "
            f"prediction. {SMALLER}"
        )


def run(processes: Executor, setup: Setup, window: Window) -> Seen:
    try:
        return processes.submit(observe, setup, window).result()
    except (BrokenProcessPool, RuntimeError, MemoryError) as error:
        if not (isinstance(error, BrokenProcessPool) or is_out_of_memory(error)):
            raise
        raise ConfigError(
            f"memory: the process of micro_batch={window.micro_batch}, accum_steps={window.accum_steps} was killed, or "
            f"was given no more memory. {SMALLER}"
        ) from error


def largest_in_budget(bench: Bench, config: Config, setup: Setup) -> int | None:
    """The largest power of two whose predicted peak fits the budget with headroom; None where not even 1 does."""
    settings = setup.optimizers.settings(config.optimizer)
    best, micro = None, 1
    while micro <= LARGEST:
        peak = predict(bench, Window(micro, 2, settings, config.precision), device=config.budget_device)
        if peak.total > (1 - HEADROOM) * config.budget_bytes:
            return best
        best, micro = micro, 2 * micro
    return best

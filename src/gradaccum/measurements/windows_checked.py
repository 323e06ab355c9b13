"""The memory measurement's computation: every window predicted, then run in a process of its own."""

from __future__ import annotations

from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool

from gradaccum.errors import ConfigError
from gradaccum.measurements.bench import Bench
from gradaccum.measurements.memory import Config
from gradaccum.measurements.memory_results import Checked, outcome
from gradaccum.measurements.processes import own_processes
from gradaccum.measurements.setup import Progress, Setup
from gradaccum.measurements.window_memory import Seen, Window, observe, predict
from gradaccum.results.outcome import Outcome
from gradaccum.results.sizes import HEADROOM

LARGEST = 2**24
"""Where the search for the largest micro-batch ends."""


def check_windows(config: Config, setup: Setup, progress: Progress) -> Outcome:
    """See `gradaccum.measurements.memory.measure`."""
    bench = Bench.prepare(setup)
    settings = setup.optimizers.settings(config.optimizer)
    windows = [
        Window(micro, steps, settings, config.precision) for micro in config.micro_batch for steps in config.accum_steps
    ]
    with own_processes() as processes:
        checked = [
            Checked(window, predict(bench, window), run(processes, setup, window))
            for window in progress(windows, "memory")
        ]
    return outcome(checked, config, largest_in_budget(bench, config, setup))


def run(processes: Executor, setup: Setup, window: Window) -> Seen:
    try:
        return processes.submit(observe, setup, window).result()
    except (BrokenProcessPool, MemoryError) as error:
        raise ConfigError(
            f"memory: the process of micro_batch={window.micro_batch}, accum_steps={window.accum_steps} was killed, "
            "most likely because its memory did not suffice. Leave that size out of memory.micro_batch: budget_bytes "
            "asks for a prediction, which runs nothing."
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

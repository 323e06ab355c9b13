"""What every measuring stage does: read its section, measure, write, log, show."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from _start import user_errors  # first: it decides whose code is run  # isort: split
from gradaccum.config import read_params, section, shared
from gradaccum.errors import ClaimError
from gradaccum.measurements.setup import Progress, Setup, no_progress
from gradaccum.results import figures
from gradaccum.results.files import write_outcome
from gradaccum.results.outcome import Outcome
from gradaccum.results.terminal import show
from gradaccum.tracking.stage_run import stage_run

Config = TypeVar("Config")
Item = TypeVar("Item")

console = Console(width=None if sys.stdout.isatty() else 140, highlight=False, emoji=False)


def run_stage(stage: str, of: type[Config], measure: Callable[[Config, Setup, Progress], Outcome]) -> None:
    """Run one measuring stage; exits 1, its files written and logged, where a claim of it does not hold."""
    with user_errors():
        params = read_params()
        config, setup = section(params, stage, of), shared(params, Setup)
        if not leads():
            measure(config, setup, no_progress)  # rank 0 writes, logs and shows what all measured
            return
        used = {stage: params[stage], **{name: params[name] for name in vars(setup) if name in params}}
        with stage_run(stage, used) as run:
            outcome = measure(config, setup, show_progress)
            paths = write_outcome(outcome)
            run.log(outcome, artifacts=paths, figures=figures.of_stage(outcome.curve, outcome.tables))
            show(outcome, console)
            console.print("wrote " + ", ".join(str(path) for path in paths), markup=False, soft_wrap=True)
            if outcome.failures:
                raise ClaimError("\n".join(outcome.failures))


def leads() -> bool:
    """Whether this process is the only one, or rank 0 of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def show_progress(items: Sequence[Item], label: str) -> Iterable[Item]:
    """A progress bar, where a terminal is attached."""
    return track(items, label, console=console, transient=True, disable=not sys.stdout.isatty())

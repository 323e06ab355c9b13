"""`gradaccum diagnose`: is accumulation right for your model and your loop?"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradaccum.errors import BatchError, ConfigError, GradaccumError

if TYPE_CHECKING:
    from gradaccum.measurements.diagnose import Diagnosis

NOT_EQUIVALENT, NOT_JUDGED = 1, 2


class Cut(click.ParamType):  # type: ignore[type-arg]  # generic only for type checkers
    """`5,4,3`: sizes of micro-batches."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        sizes = [size.strip() for size in str(value).split(",")]
        if not all(re.fullmatch("0*[1-9][0-9]{0,8}", size) for size in sizes):
            self.fail(f"{value!r} is no cut. Write the sizes of the micro-batches, such as 5,4,3.", param, ctx)
        return tuple(map(int, sizes))


@click.command()
@click.argument("workload")
@click.option("--step", metavar="PACKAGE.MODULE:STEP", help="Your loop: step(model, optimizer, micro_batches).")
@click.option("--samples", default=16, show_default=True, type=click.IntRange(2), help="Size of the batch to cut.")
@click.option("--cut", "cuts", multiple=True, type=Cut(), help="Sizes of micro-batches; may be given several times.")
@click.pass_context
def diagnose(
    ctx: click.Context, *, workload: str, step: str | None, samples: int, cuts: tuple[tuple[int, ...], ...]
) -> None:
    """Compare cuts of one batch with the whole batch, and say why they differ.

    WORKLOAD is the name of a built-in one (digits, digits_cnn, dictionary, definitions, contrastive, synthetic) or
    package.module:factory, a function of yours that returns a gradaccum.Workload. Its options are those of params.yaml,
    where this folder has one.

    Ends with 0 where the loop is equivalent to the full batch, 1 where it is not, 2 where that could not be judged.
    """
    try:
        found = _diagnose(workload, step, samples=samples, cuts=cuts)
    except BaseException as error:  # noqa: BLE001 (a user's code may raise anything, exit too, which is no verdict)
        click.echo(f"Not judged: {_raised_at(error)}{type(error).__name__}: {error}", err=True)
        ctx.exit(NOT_JUDGED)
    show(found)
    ctx.exit(0 if found.equivalent else NOT_EQUIVALENT)


def _raised_at(error: BaseException) -> str:
    """Where in the user's own file something went wrong; empty for what we refuse ourselves."""
    if isinstance(error, GradaccumError):
        return ""
    places = [place for place in traceback.extract_tb(error.__traceback__) if _is_the_users(Path(place.filename))]
    return f"{Path(places[-1].filename).name}, line {places[-1].lineno}: " if places else ""


def _is_the_users(file: Path) -> bool:
    others = (Path(sys.prefix), Path(__file__).parents[1])
    return file.is_relative_to(Path.cwd()) and not any(map(file.is_relative_to, others))


def _diagnose(name: str, step: str | None, *, samples: int, cuts: tuple[tuple[int, ...], ...]) -> Diagnosis:
    import torch  # noqa: PLC0415 (so that --help needs no torch)

    from gradaccum.measurements.diagnose import diagnose as run  # noqa: PLC0415
    from gradaccum.workloads.choice import WorkloadChoice  # noqa: PLC0415

    torch.set_num_threads(1)
    workload = WorkloadChoice.parse({**_options(name), "name": name}).load()
    if len(workload.train) < 2:
        raise BatchError(
            f"the workload {name} has {len(workload.train)} training samples, and nothing to cut. Give it two or more."
        )
    if samples > len(workload.train):
        click.echo(f"--samples {samples}: {name} has {len(workload.train)}, which are taken.", err=True)
    batch = workload.collate([workload.train[index] for index in range(min(samples, len(workload.train)))])
    return run(workload.make_model, workload.objective, batch, cuts=cuts or None, step=_load(step) if step else None)


def _options(name: str) -> dict[str, Any]:
    """The workload's own options, as the pipeline would make it."""
    from gradaccum.config import PARAMS, read_params  # noqa: PLC0415 - likewise

    given = read_params().get("workload", {}) if PARAMS.exists() else {}
    own = name.partition(":")[2] or name
    return {own: given[own]} if own in given else {}


def _load(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Callable[..., Any] = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--step {name}: {error}. Give it as package.module:function, importable from {Path.cwd()}."
        ) from error
    return found


LONGEST_NAME = 16
"""Of a parameter in a table of 80 columns."""


def _end_of(name: str) -> str:
    """The layer stands at the end of a parameter's name."""
    return name if len(name) <= LONGEST_NAME else f"...{name[3 - LONGEST_NAME :]}"


def show(found: Diagnosis) -> None:
    """Print what was found: a row a cut, then the causes with what to do."""
    from rich.console import Console  # noqa: PLC0415
    from rich.markup import escape  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from gradaccum.measurements.cuts import cut_name  # noqa: PLC0415

    console = Console(emoji=False)
    table = Table("micro x N", "float64", "float32", "norm ratio", "worst parameter", "verdict")
    for cut in found.cuts:
        table.add_row(
            cut_name(cut.cut),
            f"{cut.sharp.grad_rel_diff:.1e}",
            f"{cut.single.grad_rel_diff:.1e}",
            f"{cut.sharp.norm_ratio:.4g}",
            f"{_end_of(cut.parameters[0].name)} (x{cut.parameters[0].norm_ratio:.4g})" if not cut.equivalent else "",
            "right" if cut.equivalent else "wrong",
        )
    console.print(table)
    for advice, causes in groupby(found.causes, key=lambda cause: cause.advice):
        for cause in causes:
            console.print(f"[bold]{cause.kind}[/bold]: {escape(cause.finding)}", highlight=False)
        console.print(f"  {escape(advice)}", highlight=False)
    console.print("Equivalent to the full batch." if found.equivalent else "Not equivalent to the full batch.")

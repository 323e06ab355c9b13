"""`gradaccum sync`: MLflow, rebuilt from the files."""

from __future__ import annotations

import click

from gradaccum.tracking.track import sync as make_mlflow_agree
from gradaccum.tracking.track import sync_all


@click.command()
@click.option("--all", "everything", is_flag=True, help="Also the results of all commits and DVC experiments.")
@click.option("-v", "--verbose", is_flag=True, help="With --all, name what is left out, and what it lacks.")
def sync(everything: bool, verbose: bool) -> None:
    """Publish to MLflow what it lacks of this folder's results: after a deleted database, a pull, or a new server."""
    if everything:
        sync_all(verbose=verbose)
    else:
        make_mlflow_agree()

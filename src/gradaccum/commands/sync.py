"""`gradaccum sync`: MLflow, rebuilt from the files."""

from __future__ import annotations

import click

from gradaccum.tracking.track import sync as make_mlflow_agree


@click.command()
def sync() -> None:
    """Publish to MLflow what it lacks of this folder's results: after a deleted database, a pull, or a new server."""
    make_mlflow_agree()

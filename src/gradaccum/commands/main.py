"""`gradaccum`: the group of all commands."""

from __future__ import annotations

import click

from gradaccum.commands.diagnose import diagnose
from gradaccum.commands.plan import plan
from gradaccum.commands.sync import sync
from gradaccum.errors import GradaccumError


class Group(click.Group):
    """Commands whose errors, where a user can act on them, end with 1 and no traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except GradaccumError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=Group)
def main() -> None:
    """Gradient accumulation, proved, measured and tracked."""


main.add_command(diagnose)
main.add_command(plan)
main.add_command(sync)

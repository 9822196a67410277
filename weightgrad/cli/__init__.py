"""The `weightgrad` command. Each subcommand is one file without logic, loaded when it is called.

Subcommands are entry points of the group `weightgrad.commands` (see pyproject.toml), so the library does not import
the laboratory's commands, and another package can add its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from weightgrad.errors import WeightGradError

_GROUP = "weightgrad.commands"


class _Commands(TyperGroup):
    """A group whose commands are found by entry point and imported on first use."""

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return sorted(metadata.entry_points(group=_GROUP).names)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        del ctx
        if not (known := metadata.entry_points(group=_GROUP)):
            raise WeightGradError("weightgrad is imported but not installed, so it has no commands; run: pip install .")
        found = known.select(name=cmd_name)
        return _command(cmd_name, next(iter(found)).load()) if found else None


def _command(name: str, loaded: typer.Typer | Callable[..., None]) -> Any:
    if not isinstance(loaded, typer.Typer):
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(name)(loaded)
        loaded = alone
    command = get_command(loaded)
    command.name = name
    return command


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"weightgrad {metadata.version('weightgrad')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train one neural network on data in several data centers."""
    del version


def main() -> None:
    """Run the command line; an error of ours is one line, not a traceback."""
    try:
        app()
    except WeightGradError as error:
        print(f"weightgrad: {type(error).__name__}: {error}", file=sys.stderr)
        # As Python does for an error that nothing catches: a site that is started again must not leave at exit.
        sys.last_type, sys.last_value = type(error), error
        sys.exit(2)

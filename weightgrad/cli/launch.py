"""`weightgrad launch`: server and sites as real processes on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightgrad.cli import recipe_argument
from weightgrad.report import field_progress
from weightgrad.report.choices import safe_name
from weightgrad.train import launch as launching


def launch(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of one in recipes/, such as laptop.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write the run.  [default: runs/NAME-STRATEGY-field]", file_okay=False)
    ] = None,
) -> None:
    """Try the field on one machine: global server and all sites as processes, joined by mutual TLS."""
    chosen = recipe_argument.load(recipe, settings)
    directory = out or Path("runs") / safe_name(f"{chosen.name}-{chosen.strategy.name}-field")
    console = Console(highlight=False)
    try:
        with field_progress.watching(console, chosen.training.steps) as watch:
            summary = launching.launch(chosen, directory, watch=watch)
    except KeyboardInterrupt:
        console.print(f"Interrupted. Logs and state are in {directory}.", markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
    field_progress.show(summary, directory, console)

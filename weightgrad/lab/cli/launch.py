"""`weightgrad launch`: global server and sites as real processes on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightgrad.lab.cli import recipe_argument
from weightgrad.lab.page.watched_run import watched_run
from weightgrad.lab.report.choices import safe_name
from weightgrad.lab.report.progress import watching_deployment
from weightgrad.lab.report.summary import show_deployment
from weightgrad.lab.run import launch as launching


def launch(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of one that comes along, such as laptop.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the recipe; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory to write.", show_default="runs/NAME-STRATEGY-launched", file_okay=False),
    ] = None,
    page: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve a live page there, e.g. 127.0.0.1:7445.")
    ] = None,
) -> None:
    """Run a deployment on this machine: global server and all sites as processes, with mutual TLS."""
    chosen = recipe_argument.load(recipe, settings)
    directory = out or Path("runs") / safe_name(f"{chosen.name}-{chosen.strategy.name}-launched")
    console = Console(highlight=False)
    try:
        with (
            watched_run(page, directory, lambda line: console.print(line, markup=False, soft_wrap=True), name="launch"),
            watching_deployment(console, chosen.training.steps) as watch,
        ):
            summary = launching.launch(chosen, directory, watch=watch)
    except KeyboardInterrupt:
        console.print(f"Interrupted. Logs and checkpoints are in {directory}.", markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
    show_deployment(summary, directory, console)

"""`weightgrad simulate`: train a recipe in the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightgrad.lab.cli import recipe_argument
from weightgrad.lab.page.watched_run import watched_run
from weightgrad.lab.report.choices import safe_name
from weightgrad.lab.report.progress import watching
from weightgrad.lab.report.summary import show_run
from weightgrad.lab.run import simulation


def simulate(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of one that comes along, such as laptop.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the recipe; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory to write.", show_default="runs/NAME-STRATEGY", file_okay=False)
    ] = None,
    page: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve a live page there, e.g. 127.0.0.1:7445.")
    ] = None,
) -> None:
    """Train a recipe in the simulator: training is real, time and links are modelled."""
    chosen = recipe_argument.load(recipe, settings)
    directory = out or Path("runs") / safe_name(f"{chosen.name}-{chosen.strategy.name}")
    console = Console(highlight=False)
    key = f"{chosen.name}, {chosen.strategy.name}"
    try:
        with (
            watched_run(
                page, directory, lambda line: console.print(line, markup=False, soft_wrap=True), name="simulator"
            ),
            watching(console) as listener,
        ):
            listener.started(key)
            summary = simulation.simulate(chosen, directory, watch=lambda progress: listener.progressed(key, progress))
            listener.ended(key, None)
    except KeyboardInterrupt:
        console.print(f"Interrupted. The event log so far is in {directory}.", markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
    show_run(summary, directory, console)

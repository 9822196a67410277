"""`weightgrad simulate`: train a recipe in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightgrad.cli import recipe_argument
from weightgrad.report import run_summary
from weightgrad.report.choices import safe_name
from weightgrad.report.progress import watching
from weightgrad.train import run


def simulate(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of one in recipes/, such as laptop.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write the run.  [default: runs/NAME-STRATEGY]", file_okay=False)
    ] = None,
) -> None:
    """Train across simulated sites: gradients are real, time and links follow the recipe."""
    chosen = recipe_argument.load(recipe, settings)
    directory = out or Path("runs") / safe_name(f"{chosen.name}-{chosen.strategy.name}")
    console = Console(highlight=False)
    key = f"{chosen.name}, {chosen.strategy.name}"
    try:
        with watching(console) as watcher:
            watcher.started(key)
            summary = run.simulate(chosen, directory, watch=lambda progress: watcher.progressed(key, progress))
            watcher.ended(key, None)
    except KeyboardInterrupt:
        console.print(f"Interrupted. What was done is readable in {directory}.", markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
    run_summary.show(summary, directory, console)

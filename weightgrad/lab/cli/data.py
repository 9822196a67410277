"""`weightgrad data`: download data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from weightgrad.lab.data import fetch as fetching

app = typer.Typer(help="Download data sets.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Download data sets."""


@app.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(help="cifar10, fashion-mnist, mnist or sotu.")],
    directory: Annotated[
        Path | None, typer.Option(help="Where to keep data sets.", show_default="the user's cache", file_okay=False)
    ] = None,
) -> None:
    """Download a data set, check its SHA-256 sums, and print where it is."""
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
    console.print(f"{name} is in {place}; its checksums are right.", markup=False, soft_wrap=True)

"""`weightgrad data`: download data sets, and draw a small one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from weightgrad.lab.data import drawing
from weightgrad.lab.data import fetch as fetching
from weightgrad.lab.data.drawing import DrawPlan

app = typer.Typer(help="Download data sets, and draw a small one.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Download data sets, and draw a small one."""


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


@app.command("draw")
def draw(
    directory: Annotated[Path, typer.Argument(help="A new directory.", file_okay=False)],
    classes: Annotated[int, typer.Option(help="Number of classes.")] = DrawPlan.classes,
    train: Annotated[int, typer.Option(help="Training pictures of each class, of each site.")] = DrawPlan.train,
    test: Annotated[int, typer.Option(help="Test pictures of each class, of each site.")] = DrawPlan.test,
    size: Annotated[int, typer.Option(help="Pixels of the shortest side.")] = DrawPlan.size,
    sites: Annotated[
        str, typer.Option(help="Names of sites, separated by commas: a folder for each.", show_default="none")
    ] = "",
    ending: Annotated[str, typer.Option(help="jpg or png.")] = DrawPlan.ending,
    seed: Annotated[int, typer.Option(help="Decides the pictures.")] = DrawPlan.seed,
) -> None:
    """Draw a small folder of pictures to train on: coloured shapes, one folder for each class."""
    names = tuple(name.strip() for name in sites.split(",")) if sites else ()
    plan = DrawPlan(classes=classes, train=train, test=test, size=size, sites=names, ending=ending, seed=seed)
    count = drawing.draw(directory, plan)
    console = Console(highlight=False)
    console.print(f"{count} pictures of {classes} classes are in {directory}.", markup=False, soft_wrap=True)

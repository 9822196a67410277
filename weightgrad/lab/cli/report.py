"""`weightgrad report`: runs as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightgrad.lab.report import comparison, comparison_table, page, runs


def report(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR…", help="Run directories, or directories that contain some.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file to write.", show_default="DIR/report.html", dir_okay=False)
    ] = None,
) -> None:
    """Write one self-contained HTML file with tables and charts."""
    found, skipped = runs.find(directories)
    previous = (
        comparison_table.read_previous(directories[0])
        if len(directories) == 1
        else comparison_table.PreviousComparison()
    )
    groups = comparison.grouped(found)
    order = {name: place for place, name in enumerate(previous.order)}
    groups = dict(sorted(groups.items(), key=lambda item: order.get(item[0], len(order))))
    path = out or directories[0] / "report.html"
    page.write(groups, path, target=previous.target, command=previous.command, skipped=skipped)
    console = Console(highlight=False)
    for text in skipped:
        console.print(f"skipped: {text}", markup=False, soft_wrap=True)
    console.print(f"{path}: {len(found)} run{'s' if len(found) > 1 else ''}", markup=False, soft_wrap=True)

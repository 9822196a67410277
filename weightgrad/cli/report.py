"""`weightgrad report`: runs as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightgrad.report import comparison, comparison_table, page, runs


def report(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Runs, or directories with runs below.")],
    out: Annotated[Path | None, typer.Option(help="The file.  [default: DIR/report.html]", dir_okay=False)] = None,
) -> None:
    """Write one HTML file with tables and charts; it needs no network."""
    found, skipped = runs.find(directories)
    recalled = comparison_table.recall(directories[0]) if len(directories) == 1 else comparison_table.Recalled()
    groups = comparison.grouped(found)
    order = {name: place for place, name in enumerate(recalled.order)}
    groups = dict(sorted(groups.items(), key=lambda item: order.get(item[0], len(order))))
    path = out or directories[0] / "report.html"
    page.write(groups, path, target=recalled.target, command=recalled.command, skipped=skipped)
    console = Console(highlight=False)
    for text in skipped:
        console.print(f"left out: {text}", markup=False, soft_wrap=True)
    console.print(f"{path}: {len(found)} run{'s' if len(found) > 1 else ''}", markup=False, soft_wrap=True)

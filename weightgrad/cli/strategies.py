"""`weightgrad strategies`: the table of rows, and the parts they are made of."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from weightgrad.wan import parts
from weightgrad.wan import strategies as rows


def strategies(
    name: Annotated[str | None, typer.Argument(help="One strategy, with all its parts.")] = None,
) -> None:
    """List the strategies a recipe can name, or the parts of one."""
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    if name is None:
        table.add_column("strategy", style="bold")
        table.add_column("what it is")
        for row, about in rows.available().items():
            table.add_row(row, about)
        console.print(table)
        console.print("\nParts that a recipe may put in any row:", markup=False)
        for kind in ("trigger", "selector", "aggregator", "consistency", "resume"):
            console.print(f"\n{kind}", style="bold")
            for written, about in parts.available(kind).items():
                console.print(f"  {written}: {about}", markup=False)
        return
    table.add_column("part", style="bold")
    table.add_column("value")
    for part, value in rows.find(name).row().items():
        table.add_row(part, str(value))
    console.print(table)

"""`weightgrad strategies`: the named strategies, and the parts they are made of."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weightgrad.core import parts
from weightgrad.core import strategies as presets


def strategies(
    name: Annotated[str | None, typer.Argument(help="One strategy, with all its fields.")] = None,
) -> None:
    """List the strategies that a recipe can name and the parts it can change, or show one strategy."""
    console = Console(highlight=False)
    if name is None:
        console.print(_table("strategy", "what it is", presets.available()))
        for kind in ("trigger", "selector", "aggregator", "consistency", "resume", "controller"):
            console.print()
            console.print(_table(kind, "", parts.available(kind)))
        console.print("\n`weightgrad strategies NAME` shows the fields of one strategy.")
        console.print("A recipe may change any field of it: `strategy: {name: diloco, every: 50}`.")
        return
    chosen = presets.find(name).to_dict()
    about = chosen.pop("about")
    console.print(f"{chosen.pop('name')}: {about}\n", markup=False)
    console.print(_table("field", "value", {field: str(value) for field, value in chosen.items()}))


def _table(first: str, second: str, rows: dict[str, str]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first, style="bold", overflow="fold", max_width=44)
    table.add_column(second)
    for left, right in rows.items():
        table.add_row(escape(left), escape(right))
    return table

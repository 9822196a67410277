"""`weightgrad inspect`: what is in a frame."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightgrad.report.frame_view import describe
from weightgrad.wire import frames


def inspect(
    file: Annotated[Path, typer.Argument(help="A file of one or more frames.", exists=True, dir_okay=False)],
    values: Annotated[int, typer.Option(help="How many decoded values to show.", min=0)] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print one list of objects.")] = False,
) -> None:
    """Check and print the frames of a file: codec, parameters, shape, bytes, first values."""
    views = [describe(payload, values) for payload in frames(bytearray(file.read_bytes()))]
    if as_json:
        print(json.dumps(views, indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
    for number, view in enumerate(views):
        console.print(f"frame {number}", style="bold")
        for name, value in view.items():
            console.print(f"  {name:12}{value}", markup=False)

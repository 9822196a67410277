"""`weightgrad page`: the page of a run, finished or not."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightgrad.errors import RunError
from weightgrad.lab.page import page_server


def page(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a run.")],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to serve the page.")] = "127.0.0.1:7445",
    token: Annotated[
        str | None, typer.Option(help="What a reader must give.", show_default="made where it is not loopback")
    ] = None,
) -> None:
    """Serve the page of a run that has finished, or of one that is still running."""
    if not (directory / "events.jsonl").exists():
        raise RunError(f"{directory} has no events.jsonl; wanted the directory of a run, such as runs/laptop-auto")
    console = Console(highlight=False)
    served = page_server.serve(listen, directory, token=token)
    console.print(f"{served.url}  (Ctrl-C ends it)", markup=False, soft_wrap=True)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            served.wait()
    finally:
        served.stop()

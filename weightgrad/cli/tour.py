"""`weightgrad tour`: every codec on a real model, in about a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from weightgrad.report import tour as measurement
from weightgrad.report import tour_page


def tour(
    out: Annotated[Path, typer.Option(help="Where to write the numbers, the page and the frames.", file_okay=False)],
    steps: Annotated[int, typer.Option(help="Training steps for each codec.", min=1)] = measurement.Plan.steps,
) -> None:
    """Train a small model with every codec on the wire; print bytes, error, speed and accuracy."""
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other
    console = Console(highlight=False)
    try:
        with tour_page.watching(console, steps) as watch:
            made = measurement.measure(out, measurement.Plan(steps=steps), watch=watch)
        tour_page.show(made, out, console)
    except KeyboardInterrupt:
        console.print(f"Interrupted. What was finished is in {out}.", markup=False, soft_wrap=True)
        raise typer.Exit(130) from None

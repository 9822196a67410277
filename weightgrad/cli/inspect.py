"""`weightgrad inspect`: what is in a file of frames."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightgrad.codecs import Payload, decode
from weightgrad.codecs.registry import format_named
from weightgrad.wire import frame_bytes, frames


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


def describe(payload: Payload, values: int) -> dict[str, object]:
    """Describe the payload of a frame.

    Args:
        payload: What the frame holds.
        values: How many decoded values to show.

    Returns:
        Format, parameters, shape, sizes and first values, by name.
    """
    size, n = frame_bytes(payload), payload.numel
    view: dict[str, object] = {
        "format": f"{payload.codec} (id {format_named(payload.codec).wire_id})",
        "parameters": format_named(payload.codec).describe(payload.params),
        "dtype": str(payload.dtype).removeprefix("torch."),
        "shape": list(payload.shape),
        "elements": n,
        "frame_bytes": size,
        "body_bytes": payload.body.numel(),
        "bits_each": round(8 * size / n, 3) if n else None,
        "times_fp32": round(4 * n / size, 2) if n else None,
    }
    if values:
        flat = decode(payload).reshape(-1)
        view["values"] = [round(v, 6) for v in flat[:values].tolist()]
        view["norm"] = round(float(flat.double().norm()), 6) if n else 0.0
    return view

"""`weightgrad bench codecs`: speed of the codecs, relative to the speed of memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.live import Live

from weightgrad import kernels
from weightgrad.lab.bench import codec_speed
from weightgrad.machine import measured_on

app = typer.Typer(help="Measure this machine.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Measure this machine."""


@app.command("codecs")
def codecs(
    size_mb: Annotated[float, typer.Option(help="Megabytes of float32 to encode.", min=0.01)] = 100,
    threads: Annotated[int, typer.Option(help="Threads of the kernels and of torch.", min=1)] = 1,
    codec: Annotated[list[str] | None, typer.Option(help="Measure only this codec; may be repeated.")] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="native, portable or reference implementation; may be repeated.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Interleaved repeats; the best counts.", min=1)] = 7,
    flat: Annotated[bool, typer.Option("--flat", help="Use a vector instead of a square matrix.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the table as Markdown.")] = None,
) -> None:
    """Measure how fast every codec encodes and decodes, relative to torch's copy_ in the same run."""
    torch.set_num_threads(threads)
    kernels.set_threads(threads)
    specs = tuple(codec) if codec else codec_speed.SPECS
    backends = backend or (["native", "reference"] if kernels.status().backend == "native" else ["reference"])
    rows: list[codec_speed.Row] = []
    console = Console(stderr=as_json)
    with Live(console=console, refresh_per_second=4, transient=as_json, vertical_overflow="visible") as live:
        for row in codec_speed.measure(specs, size_mb=size_mb, flat=flat, backends=tuple(backends), repeats=repeats):
            rows.append(row)
            live.update(codec_speed.table(rows))
    if as_json:
        print(json.dumps([row.as_dict() for row in rows], indent=1))
    else:
        console.print(f"\n{codec_speed.verdict(rows, threads)}")
    if out is not None:
        command = f"weightgrad bench codecs --size-mb {size_mb:g} --threads {threads} --repeats {repeats}"
        command += " --flat" if flat else ""
        out.write_text(codec_speed.markdown(rows, command, measured_on(), threads))

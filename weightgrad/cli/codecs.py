"""`weightgrad codecs`: what there is, one line each."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from weightgrad import kernels
from weightgrad.codecs import available, explain, parse, summary


def codecs(
    spec: Annotated[str | None, typer.Argument(help="A codec to explain, or a spec to check.")] = None,
) -> None:
    """List every codec; explain one ("qsgd"); or check a spec ("ef(topk(0.01) > qsgd(bits=4))")."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if spec in available():
        console.print(explain(spec))
        return
    if spec is not None:
        codec = parse(spec)
        kind = "unbiased" if codec.unbiased else "biased"
        error = "keeps its error" if codec.carries_error else "keeps no error"
        console.print(f"{codec}  ({kind}, {error})")
        return
    for name, cls in available().items():
        console.print(f"{name:<10} {summary(cls)}")
    console.print("\n`weightgrad codecs NAME` shows a codec's arguments and where it comes from.")
    console.print(f"kernels: {kernels.status()}")

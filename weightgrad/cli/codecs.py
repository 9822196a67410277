"""`weightgrad codecs`: what there is, one line each."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weightgrad import kernels
from weightgrad.codecs import available, parse, signature, summary


def codecs(spec: Annotated[str | None, typer.Argument(help="Check this spec and say what it means.")] = None) -> None:
    """List every codec, or check a spec such as "ef(topk(0.01) > qsgd(bits=4))"."""
    console = Console()
    if spec is not None:
        codec = parse(spec)
        kind = "unbiased" if codec.unbiased else "biased"
        error = "keeps its error" if codec.carries_error else "keeps no error"
        console.print(f"{escape(str(codec))}  ({kind}, {error})", soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("codec", no_wrap=True)
    table.add_column("what it does")
    for cls in available().values():
        table.add_row(escape(signature(cls)), escape(summary(cls)))
    console.print(table)
    console.print(f"\nkernels: {kernels.status()}", soft_wrap=True, highlight=False)

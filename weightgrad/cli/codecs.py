"""`weightgrad codecs`: every codec, one line each; or one of them explained."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from weightgrad import kernels
from weightgrad.codecs import available, explain, parse, signature, summary


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
        error = "with error feedback" if codec.carries_error else "without error feedback"
        console.print(f"{codec}: {kind}, {error}")
        return
    for name, cls in available().items():
        console.print(f"{name:<10} {summary(cls)}")
        console.print(f"{'':<10} {signature(cls)}")
    console.print("\n`weightgrad codecs NAME` explains a codec and says which paper it is from.")
    console.print("`weightgrad codecs SPEC` checks a spec, such as 'ef(topk(0.01) > qsgd(bits=4))'.")
    console.print(f"kernels: {kernels.status()}")

"""What one run came to, on a few lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weightgrad.report.figures import bytes_text, percent_text, seconds_text

FILES = (
    ("ledger.jsonl", "every step, round and evaluation"),
    ("summary.json", "these numbers"),
    ("base.safetensors", "the model"),
    ("recipe.yaml", "what was run"),
)


def facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values; what a run does not have is left out."""
    made = [("accuracy", f"{percent_text(summary['accuracy'])} %")] if summary.get("accuracy") is not None else []
    made += [
        (f"{kind} accuracy", f"{percent_text(value)} %")
        for kind in ("quantized", "ema")
        if (value := summary.get(f"{kind}_accuracy")) is not None
    ]
    if summary.get("loss") is not None:
        made.append(("loss", f"{summary['loss']:.4f}"))
    made += [
        ("virtual time", seconds_text(summary["virtual_seconds"])),
        ("waiting", f"{percent_text(summary['waiting_share'], 1)} % of it"),
        ("over the WAN", bytes_text(summary["wan_bytes"])),
        ("over the LAN", bytes_text(summary["lan_bytes"])),
    ]
    made += [(key, f"{summary[key]:,}") for key in ("steps", "rounds", "parameters") if summary.get(key) is not None]
    return made


def show(summary: Mapping[str, Any], directory: Path, console: Console) -> None:
    """Print the facts and where everything is."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in facts(summary):
        table.add_row(name, value, style="bold" if name == "accuracy" else None)
    console.print(
        Text(f"{summary.get('name', '')}, {summary.get('strategy', '')}, seed {summary.get('seed', 0)}", "bold")
    )
    console.print(table)
    console.print("\nWritten:")
    for name, what in FILES:
        if (directory / name).exists():
            console.print(Text.assemble(f"  {directory / name!s:36}  ", (what, "dim")), soft_wrap=True)
    console.print(
        Text.assemble("\n  weightgrad report ", str(directory), ("   for a page with charts", "dim")), soft_wrap=True
    )

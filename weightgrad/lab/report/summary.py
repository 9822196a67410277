"""The result of a run on a few lines of a terminal: of a simulation, of a deployment, or of a chaos test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weightgrad.lab.chaos.verdict import Verdict
from weightgrad.lab.report.number_text import bytes_text, percent_text, seconds_text

FILES = (
    ("events.jsonl", "every step, round and evaluation"),
    ("summary.json", "these numbers"),
    ("model.safetensors", "the final model"),
    ("master.safetensors", "its weights in full precision"),
    ("recipe.yaml", "the recipe, with all defaults"),
)


def facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values of a summary; values that the run does not have are left out."""
    made = [("accuracy", f"{percent_text(summary['accuracy'])} %")] if summary.get("accuracy") is not None else []
    made += [
        (f"{kind} accuracy", f"{percent_text(value)} %")
        for kind, key in (("top-5", "top5"), ("quantized", "quantized"), ("ema", "ema"))
        if (value := summary.get(f"{key}_accuracy")) is not None
    ]
    if summary.get("loss") is not None:
        made.append(("loss", f"{summary['loss']:.4f}"))
    made += [
        ("virtual time", seconds_text(summary["virtual_seconds"])),
        ("waiting", f"{percent_text(summary['waiting_share'], 1)} % of the time"),
        ("WAN traffic", bytes_text(summary["wan_bytes"])),
        ("LAN traffic", bytes_text(summary["lan_bytes"])),
    ]
    made += [(key, f"{summary[key]:,}") for key in ("steps", "rounds", "parameters") if summary.get(key) is not None]
    return made


def show_run(summary: Mapping[str, Any], directory: Path, console: Console) -> None:
    """Print the result of a simulation, and which files it wrote."""
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
        Text.assemble("\n  weightgrad report ", str(directory), ("   makes a page with charts", "dim")), soft_wrap=True
    )


def show_deployment(summary: Mapping[str, Any], directory: Path, console: Console) -> None:
    """Print the result of a run with real processes."""
    emulated = summary.get("emulated")
    waiting = ", ".join(f"{site} {seconds_text(s)}" for site, s in summary["waiting_seconds"].items())
    top5 = summary.get("top5_accuracy")
    for name, value in (
        ("accuracy", f"{percent_text(summary['accuracy'], 2)} %"),
        *((("top-5 accuracy", f"{percent_text(top5, 2)} %"),) if top5 is not None else ()),
        ("wall time", f"{seconds_text(summary['wall_seconds'])}, including the start of the processes"),
        ("rounds", str(summary["rounds"])),
        ("WAN traffic", f"{bytes_text(summary['wan_bytes'])} of messages"),
        ("waiting", f"{waiting} (of each site for the WAN)"),
        *((("links", f"{emulated['kind']}, {emulated['verdict']}"),) if emulated else ()),
        ("written", f"{directory}: events.jsonl, model.safetensors, summary.json, logs/, state/"),
    ):
        console.print(f"{name:15}{value}", markup=False, soft_wrap=True)


def verdict_line(found: Verdict) -> str:
    """A verdict on one line."""
    word = "good" if found.good else "BAD"
    same = {True: ", same bits as without faults", False: ", NOT the bits of the run without faults", None: ""}
    return (
        f"{word}: {found.events} faults, {found.updates_lost} of {found.updates} updates lost, global models "
        f"{'equal' if found.models_equal else 'DIFFERENT'}{same[found.identical]}; resumed within "
        f"{seconds_text(found.worst_resume_s)}, longest stall {seconds_text(found.worst_stall_s)}"
    )


def show_verdict(found: Verdict, console: Console) -> None:
    """Print a verdict, and after a failure the command that repeats it."""
    identical = {True: "yes, bit for bit", False: "NO", None: "need not be: this strategy depends on timing"}
    rows = [
        *(("condition", line) for line in found.conditions),
        ("faults", str(found.events)),
        ("updates lost", f"{found.updates_lost} of {found.updates}, in {found.rounds} rounds"),
        *([("applied twice", str(found.updates_twice))] if found.updates_twice else []),
        ("equal models", "yes" if found.models_equal else "NO"),
        ("as fault-free", identical[found.identical]),
        ("worst resume", f"{seconds_text(found.worst_resume_s)} from the end of a fault to the next round"),
        ("worst stall", f"{seconds_text(found.worst_stall_s)} between two rounds"),
        (
            "environment",
            found.environment + ("" if found.trusted is not False else "; its links were NOT as asked for"),
        ),
        *([("problem", found.why)] if found.why else []),
        *([("to repeat", found.command)] if not found.good else []),
    ]
    for name, value in rows:
        console.print(f"{name:15}{value}", markup=False, soft_wrap=True)

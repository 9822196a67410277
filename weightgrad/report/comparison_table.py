"""The comparison for people: a table for the terminal, a page of Markdown, a JSON file, and how to read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.markup import escape
from rich.table import Table

from weightgrad.report.comparison import SHARE_OF_BASELINE, Comparison, Row, is_ours
from weightgrad.report.figures import NONE, bytes_text, percent_text, ratio_text, seconds_text
from weightgrad.report.runs import Run

HEADERS = ("strategy", "accuracy %", "Δ points", "time", "speedup", "WAN", "ratio", "LAN", "waiting %")


def accuracy_text(row: Row) -> str:
    """Mean and, with several seeds, spread."""
    spread = f" ± {percent_text(row.accuracy_std)}" if len(row.seeds) > 1 else ""
    return percent_text(row.accuracy_mean) + (spread if row.accuracy_mean is not None else "")


def speedup_text(row: Row) -> str:
    """The factor; when not every seed reached the accuracy, how many did."""
    if row.reached in (0, len(row.seeds)):
        return ratio_text(row.speedup_to_accuracy)
    return f"{ratio_text(row.speedup_to_accuracy)} ({row.reached} of {len(row.seeds)})"


def cells(row: Row, reference: str) -> tuple[str, ...]:
    """A row as text."""
    points = NONE if row.difference_points is None or row.strategy == reference else f"{row.difference_points:+.2f}"
    return (
        row.strategy + ("*" if row.unfinished else "") + ("†" if row.diverged else ""),
        accuracy_text(row),
        points,
        seconds_text(row.virtual_seconds),
        speedup_text(row),
        bytes_text(row.wan_bytes),
        ratio_text(row.wan_ratio),
        bytes_text(row.lan_bytes),
        percent_text(row.waiting_share, 1),
    )


def seeds_text(count: int) -> str:
    """One seed, two seeds."""
    return "1 seed" if count == 1 else f"{count} seeds"


def notes(comparison: Comparison) -> list[str]:
    """How to read the table; every sentence is about what is in it."""
    rows, reference = comparison.rows, comparison.reference
    said = []
    if not comparison.against_baseline:
        said.append(f"There is no baseline among these strategies: Δ, speedup and ratio are relative to {reference}.")
    counts = {len(row.seeds) for row in rows}
    if len(counts) == 1:
        count = counts.pop()
        several = "Means over {}; ± is the sample standard deviation."
        said.append(several.format(seeds_text(count)) if count > 1 else "One seed: differences may be chance.")
    else:
        said.append("Means over " + ", ".join(f"{seeds_text(len(row.seeds))} of {row.strategy}" for row in rows) + ".")
    if comparison.target is None:
        wanted = f"{100 * SHARE_OF_BASELINE:.0f} % of what {reference} ends with, seed by seed"
    else:
        wanted = f"an accuracy of {percent_text(comparison.target)} %"
    said.append(f"Speedup: {reference}'s virtual time to reach {wanted}, over the strategy's time to reach the same.")
    never = [row.strategy for row in rows if row.speedup_to_accuracy is None]
    if never:
        said.append(f"{NONE} under speedup: no seed reached it ({', '.join(never)}).")
    if any(row.unfinished for row in rows):
        said.append("* has runs that were interrupted before their last step.")
    lost = [f"{row.strategy} {row.diverged} of {len(row.seeds)}" for row in rows if row.diverged]
    if lost:
        said.append(f"† diverged, and counts with its last evaluation: {', '.join(lost)}.")
    return said


def table(comparison: Comparison, width: int) -> Table:
    """For a terminal of this width; where it is too narrow for all, the last columns are left to comparison.md."""
    padding = 1 if width < 110 else 3
    made = Table(box=None, pad_edge=False, padding=(0, padding, 0, 0))
    headers = [header.replace(" ", "\n") if width < 110 else header for header in HEADERS]
    rows = [cells(row, comparison.reference) for row in comparison.rows]
    shown, used = 0, 0
    for place, header in enumerate(headers):
        used += padding + max(*map(len, header.split("\n")), 1, *(len(row[place]) for row in rows))
        if place < 3 or used - padding <= width:
            shown = place + 1
    for place, header in enumerate(headers[:shown]):
        justify: Literal["left", "right"] = "right" if place else "left"
        made.add_column(
            header, justify=justify, no_wrap=place > 0, overflow="fold", vertical="bottom", header_style="dim"
        )
    for row, texts in zip(comparison.rows, rows, strict=True):
        bold = "bold" if is_ours(row.strategy) else None
        made.add_row(*(escape(cell) for cell in texts[:shown]), style=bold)
    return made


def markdown(comparison: Comparison, *, title: str, command: str, machine: str) -> str:
    """The table as a document, with what it takes to repeat it."""
    lines = [
        f"# {title}",
        "",
        "```sh",
        command,
        "```",
        "",
        f"{machine}.",
        "",
        "| " + " | ".join(HEADERS) + " |",
        "|---|" + "---:|" * (len(HEADERS) - 1),
    ]
    for row in comparison.rows:
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row, comparison.reference)) + " |")
    lines += ["", *(f"- {note}" for note in notes(comparison)), ""]
    return "\n".join(lines)


def document(
    comparison: Comparison, runs: Sequence[Run], *, command: str, machine: str, failures: Sequence[str]
) -> dict[str, object]:
    """Every number, for `comparison.json`: what `--json` prints and what it leaves out."""
    return {
        "command": command,
        "machine": machine,
        "reference": comparison.reference,
        "target": comparison.target,
        "strategies": [asdict(row) for row in comparison.rows],
        "runs": [
            {"strategy": run.strategy, "seed": run.seed, "directory": str(run.directory), **run.summary} for run in runs
        ],
        "failures": list(failures),
    }


@dataclass(frozen=True)
class Recalled:
    """What a report takes over from the comparison that made the runs."""

    command: str | None = None
    target: float | None = None
    order: tuple[str, ...] = ()


def recall(directory: Path) -> Recalled:
    """From a directory's `comparison.json`; nothing if there is none that can be read."""
    try:
        made = json.loads((directory / "comparison.json").read_text(encoding="utf-8"))
        order = tuple(str(row["strategy"]) for row in made["strategies"])
        target = None if made["target"] is None else float(made["target"])
        return Recalled(str(made["command"]), target, order)
    except (OSError, ValueError, LookupError, TypeError):
        return Recalled()


def write(
    comparison: Comparison,
    runs: Sequence[Run],
    directory: Path,
    *,
    command: str,
    machine: str,
    failures: Sequence[str] = (),
) -> list[Path]:
    """Write `comparison.json` and `comparison.md`; their paths."""
    made = document(comparison, runs, command=command, machine=machine, failures=failures)
    title = f"{runs[0].name}: {', '.join(row.strategy for row in comparison.rows)}" if runs else directory.name
    page = markdown(comparison, title=title, command=command, machine=machine)
    paths = [directory / "comparison.json", directory / "comparison.md"]
    paths[0].write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(page, encoding="utf-8")
    return paths

"""A comparison as a table for the terminal, as Markdown and as JSON, with notes on how to read it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.markup import escape
from rich.table import Table

from weightgrad.lab.report.comparison import SHARE_OF_BASELINE, Comparison, Row, is_own_strategy
from weightgrad.lab.report.number_text import NONE, bytes_text, percent_text, ratio_text, seconds_text
from weightgrad.lab.report.runs import Run

HEADERS = ("strategy", "accuracy %", "Δ points", "time", "speedup", "WAN", "ratio", "LAN", "waiting %")


def accuracy_text(row: Row) -> str:
    """The mean accuracy and, with several seeds, its standard deviation."""
    spread = f" ± {percent_text(row.accuracy_std)}" if len(row.seeds) > 1 else ""
    return percent_text(row.accuracy_mean) + (spread if row.accuracy_mean is not None else "")


def speedup_text(row: Row) -> str:
    """The speedup; if not every seed reached the accuracy, also how many did."""
    if row.reached in (0, len(row.seeds)):
        return ratio_text(row.speedup_to_accuracy)
    return f"{ratio_text(row.speedup_to_accuracy)} ({row.reached} of {len(row.seeds)})"


def headers(comparison: Comparison) -> tuple[str, ...]:
    """The heads of the columns; the top-5 accuracy has one where the data set has it."""
    return (*HEADERS[:2], "top-5 %", *HEADERS[2:]) if comparison.has_top5 else HEADERS


def table_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """The cells of all rows as text, for these headers."""
    found = []
    for row in comparison.rows:
        texts = cells(row, comparison.reference)
        found.append((*texts[:2], percent_text(row.top5_accuracy), *texts[2:]) if comparison.has_top5 else texts)
    return found


def cells(row: Row, reference: str) -> tuple[str, ...]:
    """The cells of a row as text, without the top-5 accuracy."""
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
    """`1 seed`, `2 seeds`."""
    return "1 seed" if count == 1 else f"{count} seeds"


def notes(comparison: Comparison) -> list[str]:
    """Sentences on how to read the table; only those that apply to it."""
    rows, reference = comparison.rows, comparison.reference
    said = []
    if not comparison.against_baseline:
        said.append(f"The strategy baseline is not among these: Δ, speedup and ratio are relative to {reference}.")
    counts = {len(row.seeds) for row in rows}
    if len(counts) == 1:
        count = counts.pop()
        several = "Means over {}; ± is the sample standard deviation."
        said.append(
            several.format(seeds_text(count)) if count > 1 else "One seed only: small differences may be chance."
        )
    else:
        said.append("Means over " + ", ".join(f"{seeds_text(len(row.seeds))} of {row.strategy}" for row in rows) + ".")
    if comparison.target is None:
        wanted = f"{100 * SHARE_OF_BASELINE:.0f} % of what {reference} ends with, seed by seed"
    else:
        wanted = f"an accuracy of {percent_text(comparison.target)} %"
    said.append(
        f"Speedup: virtual time of {reference} to reach {wanted}, divided by the strategy's time to reach the same."
    )
    never = [row.strategy for row in rows if row.speedup_to_accuracy is None]
    if never:
        said.append(f"{NONE} under speedup: no seed reached that accuracy ({', '.join(never)}).")
    if any(row.unfinished for row in rows):
        said.append("*: some runs were interrupted before their last step.")
    lost = [f"{row.strategy} {row.diverged} of {len(row.seeds)}" for row in rows if row.diverged]
    if lost:
        said.append(f"†: diverged; its last evaluation counts: {', '.join(lost)}.")
    return said


def table(comparison: Comparison, width: int) -> Table:
    """The table for a terminal; if the width is too small, the last columns are only in comparison.md."""
    padding = 1 if width < 110 else 3
    made = Table(box=None, pad_edge=False, padding=(0, padding, 0, 0))
    heads = [header.replace(" ", "\n") if width < 110 else header for header in headers(comparison)]
    rows = table_rows(comparison)
    shown, used = 0, 0
    for place, header in enumerate(heads):
        used += padding + max(*map(len, header.split("\n")), 1, *(len(row[place]) for row in rows))
        if place < 3 or used - padding <= width:
            shown = place + 1
    for place, header in enumerate(heads[:shown]):
        justify: Literal["left", "right"] = "right" if place else "left"
        made.add_column(
            header, justify=justify, no_wrap=place > 0, overflow="fold", vertical="bottom", header_style="dim"
        )
    for row, texts in zip(comparison.rows, rows, strict=True):
        bold = "bold" if is_own_strategy(row.strategy) else None
        made.add_row(*(escape(cell) for cell in texts[:shown]), style=bold)
    return made


def markdown(comparison: Comparison, *, title: str, command: str, machine: str) -> str:
    """The table as a Markdown page, with the command that repeats it."""
    heads = headers(comparison)
    lines = [
        f"# {title}",
        "",
        "```sh",
        command,
        "```",
        "",
        f"{machine}.",
        "",
        "| " + " | ".join(heads) + " |",
        "|---|" + "---:|" * (len(heads) - 1),
    ]
    for texts in table_rows(comparison):
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in texts) + " |")
    lines += ["", *(f"- {note}" for note in notes(comparison)), ""]
    return "\n".join(lines)


def document(
    comparison: Comparison, runs: Sequence[Run], *, command: str, machine: str, failures: Sequence[str]
) -> dict[str, object]:
    """All numbers, for `comparison.json`: those that `--json` prints, and more."""
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
class PreviousComparison:
    """What a report needs to know about the comparison that made the runs."""

    command: str | None = None
    target: float | None = None
    order: tuple[str, ...] = ()


def read_previous(directory: Path) -> PreviousComparison:
    """Read a directory's `comparison.json`; the result is empty if there is none that can be read."""
    try:
        made = json.loads((directory / "comparison.json").read_text(encoding="utf-8"))
        order = tuple(str(row["strategy"]) for row in made["strategies"])
        target = None if made["target"] is None else float(made["target"])
        return PreviousComparison(str(made["command"]), target, order)
    except (OSError, ValueError, LookupError, TypeError):
        return PreviousComparison()


def write(
    comparison: Comparison,
    runs: Sequence[Run],
    directory: Path,
    *,
    command: str,
    machine: str,
    failures: Sequence[str] = (),
) -> list[Path]:
    """Write `comparison.json` and `comparison.md`; returns their paths."""
    made = document(comparison, runs, command=command, machine=machine, failures=failures)
    title = f"{runs[0].name}: {', '.join(row.strategy for row in comparison.rows)}" if runs else directory.name
    page = markdown(comparison, title=title, command=command, machine=machine)
    paths = [directory / "comparison.json", directory / "comparison.md"]
    paths[0].write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(page, encoding="utf-8")
    return paths

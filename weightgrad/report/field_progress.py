"""A run in the field while it runs: a bar for each site, or now and then a line of text; and what it came to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from weightgrad.report.figures import bytes_text, percent_text, seconds_text
from weightgrad.train.launch import Standing
from weightgrad.units import show_bit_s


@contextmanager
def watching(console: Console, steps: int) -> Iterator[Callable[[Standing], None]]:
    """Whatever suits the console."""
    if not console.is_terminal:
        yield _lines(console, steps)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.completed}/{task.total}  {task.fields[about]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True, expand=True) as bars:
        tasks: dict[str, TaskID] = {}

        def watch(now: Standing) -> None:
            for ends, rate in now.rates.items():
                if ends not in tasks:
                    tasks[ends] = bars.add_task(f"  {ends}", total=None, about="")
                bars.update(tasks[ends], about=show_bit_s(round(rate, -3)))
            for site, step in now.steps.items():
                if site not in tasks:
                    tasks[site] = bars.add_task(site, total=steps, about="")
                about = f"loss {now.losses[site]:.3f}" if step else "starting"
                bars.update(tasks[site], completed=step, about=f"{about}  {bytes_text(now.wan_bytes)} over the WAN")

        yield watch


def _lines(console: Console, steps: int) -> Callable[[Standing], None]:
    told = -1
    links = ""

    def watch(now: Standing) -> None:
        nonlocal told, links
        if now.rates:
            links = "; now " + ", ".join(f"{ends} {show_bit_s(round(rate, -3))}" for ends, rate in now.rates.items())
        slowest = min(now.steps.values(), default=0)
        part = 10 * slowest // max(1, steps)
        if part > told:
            told = part
            sites = ", ".join(f"{site} {step}" for site, step in now.steps.items())
            console.print(
                f"{seconds_text(now.seconds)}: steps {sites} of {steps}; {now.rounds} rounds, "
                f"{bytes_text(now.wan_bytes)} over the WAN{links}",
                markup=False,
                soft_wrap=True,
            )

    return watch


def show(summary: Mapping[str, Any], directory: Path, console: Console) -> None:
    """What the run came to, on a few lines."""
    emulated = summary.get("emulated")
    waiting = ", ".join(f"{site} {seconds_text(s)}" for site, s in summary["waiting_seconds"].items())
    for name, value in (
        ("accuracy", f"{percent_text(summary['accuracy'], 2)} %"),
        ("time", f"{seconds_text(summary['wall_seconds'])}, starting the processes included"),
        ("rounds", str(summary["rounds"])),
        ("over the WAN", f"{bytes_text(summary['wan_bytes'])} of messages"),
        ("waiting", waiting),
        *((("links", f"{emulated['kind']}, {emulated['verdict']}"),) if emulated else ()),
        ("written", f"{directory}: ledger.jsonl, base.safetensors, summary.json, logs/, state/"),
    ):
        console.print(f"{name:14}{value}", markup=False, soft_wrap=True)

"""The progress of runs: bars on a terminal, and a line of text now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.table import Column

from weightgrad.lab.report.number_text import NONE, bytes_text, percent_text, seconds_text
from weightgrad.lab.report.sweep import ProgressListener
from weightgrad.lab.run.launch import RunProgress
from weightgrad.units import show_bit_s

if TYPE_CHECKING:
    from weightgrad.lab.run.simulation import Progress

_NAME = 24  # letters
_BLANK: dict[str, Any] = {"step": "", "loss": "", "accuracy": "", "time": "", "wan": ""}


def line(progress: Progress) -> str:
    """The progress of a run on one line."""
    accuracy = "" if progress.accuracy is None else f", accuracy {percent_text(progress.accuracy, 1)} %"
    return (
        f"step {progress.step} of {progress.steps}, loss {progress.loss:.3f}{accuracy}, "
        f"virtual time {seconds_text(progress.virtual_seconds)}, WAN traffic {bytes_text(progress.wan_bytes)}"
    )


class TextProgress:
    """For a file or a pipe: prints a line after every `part` (a fraction) of a run's steps."""

    def __init__(self, console: Console, part: float) -> None:
        self._console = console
        self._part = part
        self._printed: dict[str, int] = {}

    def _say(self, key: str, text: str) -> None:
        self._console.print(f"{key}: {text}", markup=False, highlight=False, soft_wrap=True)

    def started(self, key: str) -> None:
        """Print that a run has started."""
        self._printed[key] = 0
        self._say(key, "started")

    def progressed(self, key: str, progress: Progress) -> None:
        """Print the progress if another part of the steps is done."""
        parts = int(progress.step / (progress.steps * self._part) + 1e-9)
        if parts > self._printed[key]:
            self._printed[key] = parts
            self._say(key, line(progress))

    def ended(self, key: str, error: str | None) -> None:
        """Print that a run has ended."""
        self._say(key, "finished" if error is None else f"failed: {error}")


def _column(text: str, width: int) -> TextColumn:
    cell = Column(width=width, no_wrap=True, overflow="ellipsis", justify="right")
    return TextColumn(text, markup=False, justify="right", table_column=cell)


class BarProgress:
    """For a terminal: shows a bar for each run in progress, and one for all runs together."""

    def __init__(self, bars: Bars, runs: int) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._runs = runs
        self._over = 0
        self._all = bars.add_task(self._left(), total=runs, **_BLANK) if runs > 1 else None

    def _left(self) -> str:
        return f"{self._runs - self._over} of {self._runs} runs to go"

    def _count(self) -> None:
        if self._all is not None:
            self._bars.update(self._all, completed=self._over, description=self._left())

    def started(self, key: str) -> None:
        """Add a bar."""
        self._tasks[key] = self._bars.add_task(key, total=None, **_BLANK)
        self._count()

    def progressed(self, key: str, progress: Progress) -> None:
        """Move a bar."""
        self._bars.update(
            self._tasks[key],
            total=progress.steps,
            completed=progress.step,
            step=f"{progress.step}/{progress.steps}",
            loss=f"loss {progress.loss:.3f}",
            accuracy=NONE if progress.accuracy is None else f"{percent_text(progress.accuracy, 1)} %",
            time=seconds_text(progress.virtual_seconds),
            wan=f"WAN {bytes_text(progress.wan_bytes)}",
        )

    def ended(self, key: str, error: str | None) -> None:
        """Remove a bar; an error is printed and stays."""
        self._bars.remove_task(self._tasks.pop(key))
        self._over += 1
        self._count()
        if error is not None:
            self._bars.console.print(
                f"[red]failed[/red]  {escape(key)}: {escape(error)}", highlight=False, soft_wrap=True
            )


@contextmanager
def watching(console: Console, *, runs: int = 1, part: float = 0.05) -> Iterator[ProgressListener]:
    """Show the progress of simulated runs, as suits the console.

    Args:
        console: Where to print.
        runs: Number of runs.
        part: The fraction of a run's steps between two lines, where there are no bars.
    """
    if not console.is_terminal:
        yield TextProgress(console, part)
        return
    name = Column(max_width=_NAME, no_wrap=True, overflow="ellipsis")
    columns = (
        TextColumn("{task.description}", markup=False, table_column=name),
        BarColumn(bar_width=None, table_column=Column(min_width=4, ratio=1)),
        _column("{task.fields[step]}", 11),
        _column("{task.fields[loss]}", 10),
        _column("{task.fields[accuracy]}", 7),
        _column("{task.fields[time]}", 8),
        _column("{task.fields[wan]}", 11),
    )
    with Bars(*columns, console=console, transient=True, expand=True) as bars:
        yield BarProgress(bars, runs)


@contextmanager
def watching_deployment(console: Console, steps: int) -> Iterator[Callable[[RunProgress], None]]:
    """Show a bar for each site on a terminal, or a line of text now and then elsewhere."""
    if not console.is_terminal:
        yield _text_progress(console, steps)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.completed}/{task.total}  {task.fields[about]}", markup=False),
    )
    with Bars(*columns, console=console, transient=True, expand=True) as bars:
        tasks: dict[str, TaskID] = {}

        def watch(now: RunProgress) -> None:
            for ends, rate in now.rates.items():
                if ends not in tasks:
                    tasks[ends] = bars.add_task(f"  {ends}", total=None, about="")
                bars.update(tasks[ends], about=show_bit_s(round(rate, -3)))
            for site, step in now.steps.items():
                if site not in tasks:
                    tasks[site] = bars.add_task(site, total=steps, about="")
                about = f"loss {now.losses[site]:.3f}" if step else "starting"
                bars.update(tasks[site], completed=step, about=f"{about}  WAN {bytes_text(now.wan_bytes)}")

        yield watch


def _text_progress(console: Console, steps: int) -> Callable[[RunProgress], None]:
    printed = -1
    links = ""

    def watch(now: RunProgress) -> None:
        nonlocal printed, links
        if now.rates:
            links = "; now " + ", ".join(f"{ends} {show_bit_s(round(rate, -3))}" for ends, rate in now.rates.items())
        slowest = min(now.steps.values(), default=0)
        part = 10 * slowest // max(1, steps)
        if part > printed:
            printed = part
            sites = ", ".join(f"{site} {step}" for site, step in now.steps.items())
            console.print(
                f"{seconds_text(now.seconds)}: steps {sites} of {steps}; rounds {now.rounds}, "
                f"WAN traffic {bytes_text(now.wan_bytes)}{links}",
                markup=False,
                soft_wrap=True,
            )

    return watch

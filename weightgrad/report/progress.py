"""Runs while they run: a line with a bar for each on a terminal, now and then a line of text elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.table import Column

from weightgrad.report.figures import NONE, bytes_text, percent_text, seconds_text
from weightgrad.report.sweep import Watcher

if TYPE_CHECKING:
    from weightgrad.train.run import Progress

_NAME = 24  # letters
_BLANK: dict[str, Any] = {"step": "", "loss": "", "accuracy": "", "time": "", "wan": ""}


def line(progress: Progress) -> str:
    """How far a run is, on one line of text."""
    accuracy = "" if progress.accuracy is None else f", accuracy {percent_text(progress.accuracy, 1)} %"
    return (
        f"step {progress.step} of {progress.steps}, loss {progress.loss:.3f}{accuracy}, "
        f"{seconds_text(progress.virtual_seconds)} virtual, {bytes_text(progress.wan_bytes)} over the WAN"
    )


class Lines:
    """For a file or a pipe: a line whenever a run has made another part of its steps."""

    def __init__(self, console: Console, part: float) -> None:
        self._console = console
        self._part = part
        self._told: dict[str, int] = {}

    def _say(self, key: str, text: str) -> None:
        self._console.print(f"{key}: {text}", markup=False, highlight=False, soft_wrap=True)

    def started(self, key: str) -> None:
        """Say so."""
        self._told[key] = 0
        self._say(key, "started")

    def progressed(self, key: str, progress: Progress) -> None:
        """Say so if it is a part further."""
        parts = int(progress.step / (progress.steps * self._part) + 1e-9)
        if parts > self._told[key]:
            self._told[key] = parts
            self._say(key, line(progress))

    def ended(self, key: str, error: str | None) -> None:
        """Say so."""
        self._say(key, "finished" if error is None else f"failed: {error}")


def _column(text: str, width: int) -> TextColumn:
    cell = Column(width=width, no_wrap=True, overflow="ellipsis", justify="right")
    return TextColumn(text, markup=False, justify="right", table_column=cell)


class Lights:
    """For a terminal: a bar for each run that is under way, and one for all of them."""

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
        """Give it a line."""
        self._tasks[key] = self._bars.add_task(key, total=None, **_BLANK)
        self._count()

    def progressed(self, key: str, progress: Progress) -> None:
        """Move its bar."""
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
        """Take its line away; an error stays."""
        self._bars.remove_task(self._tasks.pop(key))
        self._over += 1
        self._count()
        if error is not None:
            self._bars.console.print(
                f"[red]failed[/red]  {escape(key)}: {escape(error)}", highlight=False, soft_wrap=True
            )


@contextmanager
def watching(console: Console, *, runs: int = 1, part: float = 0.05) -> Iterator[Watcher]:
    """Whatever suits the console."""
    if not console.is_terminal:
        yield Lines(console, part)
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
        yield Lights(bars, runs)

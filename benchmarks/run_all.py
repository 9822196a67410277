"""The runs of all tables: which are done, which are missing, how long they take; and goes on with the missing ones.

    python benchmarks/run_all.py                               # lists
    python benchmarks/run_all.py --list --only qsgd,mlp        # lists every missing run of two tables
    python benchmarks/run_all.py --resume                      # goes on, one run after the other, until all is done
    python benchmarks/run_all.py --resume --only mlp --most-runs 2 --jobs 2

A table is a file `table_NAME.py` that has

    Plan, QUICK        a frozen dataclass of settings, and the one of `--quick`
    FULL               optional: the plan whose runs are wanted here; `Plan()` if there is none
    wanted(plan)       the runs, a list of `table_runs.Cell`, in the order in which they matter
    make(plan, options)  the document; it takes its runs from `table_runs.run(wanted(plan), options)`
    PARTIAL = True     optional: `make` makes sense of a table some of whose runs are missing

A finished run is kept as a small file below `benchmarks/results/records`, by a hash of what was run, with date and
machine. Committed, it is done for every other machine. Ctrl-C loses only what has not been finished.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import table_runs
from rich.console import Console
from run_estimates import RunEstimates
from run_records import RunRecords
from table_runs import Cell
from tables import HERE, Document, Options, output_directory, prepare_process

from weightgrad.errors import WeightGradError


@dataclass(frozen=True)
class Table:
    """A table script that declares its runs.

    Attributes:
        name: `mlp` of `table_mlp.py`.
        plan: The plan whose runs are wanted.
        wanted: Makes the list of runs of a plan.
        make: Makes the document of a plan.
        partial: Whether the document makes sense while runs are missing.
    """

    name: str
    plan: Any
    wanted: Callable[[Any], list[Cell]]
    make: Callable[[Any, Options], Document]
    partial: bool

    @classmethod
    def load(cls, path: Path, *, quick: bool) -> Table | None:
        """The table of a script; None if it declares no runs."""
        module = importlib.import_module(path.stem)
        if not hasattr(module, "wanted"):
            return None
        plan = module.QUICK if quick else getattr(module, "FULL", None) or module.Plan()
        name = path.stem.removeprefix("table_")
        return cls(name, plan, module.wanted, module.make, getattr(module, "PARTIAL", False))


@dataclass(frozen=True)
class Progress:
    """The runs of a table, and how long the missing ones will take."""

    table: Table
    options: Options
    cells: list[Cell]
    missing: list[Cell]
    seconds: dict[str, float | None]  # of the missing ones, by label

    @property
    def left(self) -> float:
        """Seconds of the missing runs whose length is known."""
        return sum(seconds or 0.0 for seconds in self.seconds.values())

    def line(self) -> str:
        """One line for the overview."""
        done = len(self.cells) - len(self.missing)
        text = f"{self.table.name:<12} {done:>4} of {len(self.cells):>4} runs done"
        return f"{text}; left: {_duration(self.missing, self.seconds)}" if self.missing else text

    def parts(self) -> list[str]:
        """What is missing, part by part."""
        found = []
        for part in dict.fromkeys(cell.part for cell in self.missing):
            own = [cell for cell in self.missing if cell.part == part]
            total = sum(cell.part == part for cell in self.cells)
            rows: dict[str, list[str]] = {}
            for cell in own:
                rows.setdefault(cell.row, []).append(str(cell.key.seed))
            several = any(cell.key.seed for cell in self.cells)
            said = "; ".join(f"{row} (seed {' '.join(seeds)})" if several else row for row, seeds in rows.items())
            lasts = _duration(own, self.seconds)
            found.append(f"{part}: {len(own)} of {total} runs, {lasts}: {said}")
        return found


def _duration(cells: Sequence[Cell], seconds: dict[str, float | None]) -> str:
    """Time of one core."""
    known = [found for cell in cells if (found := seconds[cell.label]) is not None]
    if not known:
        return "how long is not known"
    total = sum(known)
    text = f"about {total / 3600:.1f} h" if total >= 3600 else f"about {total / 60:.0f} min"
    unknown = len(cells) - len(known)
    return f"{text} and {unknown} runs of unknown length" if unknown else text


def find(directory: Path, only: Sequence[str], *, quick: bool) -> list[Table]:
    """The tables of a directory that declare their runs.

    Args:
        directory: Where the scripts are.
        only: Names, in the order in which they are wanted; none means all.
        quick: Whether their quick plans are wanted.

    Raises:
        WeightGradError: There is no such table.
    """
    paths = {path.stem.removeprefix("table_"): path for path in sorted(directory.glob("table_*.py"))}
    loaded = {name: Table.load(paths[name], quick=quick) for name in (only or paths) if name in paths}
    found = {name: table for name, table in loaded.items() if table is not None}
    wrong = [name for name in only if name not in found]
    if wrong:
        known = [name for name, path in paths.items() if Table.load(path, quick=quick)]
        raise WeightGradError(f"no runs of a table {wrong[0]!r}; there are {', '.join(known)}")
    return list(found.values())


def look(table: Table, options: Options, *, measure: bool) -> Progress:
    """Which runs of a table are done."""
    cells = table.wanted(table.plan)
    missing = [cell for cell in cells if table_runs.finished_run(cell, options) is None]
    runs = RunRecords(options.records).all()
    estimates = RunEstimates(runs, options.runs / "estimates.json", measure=measure)
    return Progress(table, options, cells, missing, {cell.label: estimates.seconds(cell) for cell in missing})


def go_on(progress: Progress, most: int | None, console: Console) -> tuple[int, list[str]]:
    """Make the missing runs of a table, at most so many, and its document.

    Returns:
        The number of runs that were started, and those that failed.
    """
    todo = progress.missing[:most]
    table, options = progress.table, progress.options
    try:
        failures = table_runs.make(todo, options, console)
    finally:  # an interrupted table is made of what there is
        now = look(table, options, measure=False)
        if len(now.missing) < len(progress.missing):
            write(now, console)
    return len(todo), [f"{label}: {error}" for label, error in failures.items()]


def write(progress: Progress, console: Console) -> None:
    """Write the document of a table, if it makes sense with what there is."""
    table = progress.table
    if progress.missing and not (table.partial and len(progress.missing) < len(progress.cells)):
        console.print(f"{table.name}: its document is made when nothing is missing.", highlight=False)
        return
    read_only = dataclasses.replace(progress.options, resume=False)
    if not table_runs.run(progress.cells, read_only).parts:
        console.print(f"{table.name}: no part has its first row yet, which the others are compared with.")
        return
    document = table.make(table.plan, read_only)
    document.missing = progress.parts()
    paths = document.write(progress.options)
    console.print("Written: " + ", ".join(map(str, paths)), soft_wrap=True, highlight=False)


def main(argv: Sequence[str] | None = None, directory: Path = HERE) -> int:
    """List or go on; returns the code of the process.

    Args:
        argv: The arguments; None takes those of the process.
        directory: Where the table scripts are.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="list only, every missing run")
    parser.add_argument("--resume", action="store_true", help="make the missing runs and the documents")
    parser.add_argument("--write", action="store_true", help="make the documents of what there is, and no runs")
    parser.add_argument("--only", default="", help="tables, in this order: qsgd,mlp [all, the shortest first]")
    parser.add_argument("--most-runs", type=int, help="stop after so many runs")
    parser.add_argument("--jobs", type=int, help="runs at a time, each on one thread [1; quick: 0, no processes]")
    parser.add_argument("--quick", action="store_true", help="the tables' quick plans; nothing to conclude from")
    parser.add_argument("--out", type=Path, help="where results go [benchmarks/results; quick: runs/tables-quick]")
    parser.add_argument("--runs", type=Path, help="directory of unfinished runs [runs/tables; quick: OUT/runs]")
    given = parser.parse_args(argv)
    out = output_directory(parser, given, Path("runs/tables-quick"))
    jobs = (0 if given.quick else 1) if given.jobs is None else given.jobs
    if jobs < 0 or (given.most_runs is not None and given.most_runs < 1):
        parser.error("--jobs must be at least 0, and --most-runs at least 1")
    prepare_process()
    console = Console(stderr=True, highlight=False)
    only = [name.strip() for name in given.only.split(",") if name.strip()]
    try:
        chosen = find(directory, only, quick=given.quick)
    except WeightGradError as error:
        parser.error(str(error))
    runs = given.runs or (out / "runs" if given.quick else Path("runs/tables"))

    def options(table: Table) -> Options:
        words = ["python", "benchmarks/run_all.py", "--resume", "--only", table.name]
        words += ["--quick"] if given.quick else []
        return Options(name=table.name, command=shlex.join(words), quick=given.quick, out=out, runs=runs, jobs=jobs)

    tables = [look(table, options(table), measure=not given.quick) for table in chosen]
    if not only:
        tables.sort(key=lambda one: one.left)
    for one in tables:
        print(one.line())
        if given.list or only:
            for text in one.parts():
                print(f"  {text}")
    if given.write:
        for one in tables:
            write(one, console)
    if given.list or given.write or not given.resume:
        return 0
    left, failures = given.most_runs, []
    try:
        for one in tables:
            if one.missing and (left is None or left > 0):
                started, failed = go_on(one, left, console)
                left = None if left is None else left - started
                failures += failed
    except KeyboardInterrupt:
        console.print(f"Interrupted. What is finished is kept in {out / 'records'}; the same command goes on.")
        return 130
    for text in failures:
        console.print(f"Failed: {text}", soft_wrap=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

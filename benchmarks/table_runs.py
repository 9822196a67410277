"""The simulated runs of a table: made where they are missing, kept as records, read back, and compared.

    runs/tables/NAME/PART/ROW-HASH/seed-0                         # what the simulator writes
    benchmarks/results/records/NAME/PART/ROW-HASH-seed-0.json     # what is kept of it, in the repository

The hash is that of the recipe and of the strategy as it is now (`run_records.py`), so a file belongs to exactly what
made it. A finished run is not made again, and a run of an older strategy or plan is left alone.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import validation_split
from result_table import ResultTable, Row
from rich.console import Console
from run_records import RunKey, RunRecords
from tables import Difference, Options, difference

from weightgrad.errors import RunError, WeightGradError
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report import comparison, sweep
from weightgrad.lab.report.choices import Choice, safe_name
from weightgrad.lab.report.progress import watching
from weightgrad.lab.report.runs import Run
from weightgrad.lab.run import simulation as train_run

CHECKPOINT_SECONDS = 600.0  # of a run; what an interrupt loses at most

Strategy = str | Mapping[str, Any]  # a name, or a mapping with a name and changes


@dataclass(frozen=True)
class Cell:
    """One run: the part and the row of the table that it belongs to, and the recipe with its seed.

    With `held_out` a tenth of the training data takes the place of the test data (`validation_split.py`).
    """

    part: str
    row: str
    recipe: Recipe
    held_out: bool = False

    @functools.cached_property
    def key(self) -> RunKey:
        return RunKey.of(self.recipe, held_out=self.held_out)

    @property
    def label(self) -> str:
        return f"{self.part}, {self.row} seed {self.key.seed}"

    def job(self, runs: Path) -> sweep.Job:
        """The run as a job of a sweep, below the directory of the table's runs."""
        directory = runs / safe_name(self.part) / f"{safe_name(self.row)}-{self.key.mark}" / f"seed-{self.key.seed}"
        recipe = self.recipe.with_settings([f"data.directory={_split(runs)}"]) if self.held_out else self.recipe
        return sweep.Job(Choice(f"{self.part}, {self.row}"), self.key.seed, recipe, directory)


def _split(runs: Path) -> Path:
    return runs.parent / "validation"


def cells(
    part: str,
    recipe: Recipe,
    rows: Mapping[str, Strategy],
    seeds: int,
    *,
    first_seed: int = 0,
    held_out: bool = False,
) -> list[Cell]:
    """The runs of every row, seed by seed; the first row is the reference of the others."""
    found = []
    for seed in range(first_seed, first_seed + seeds):
        for row, strategy in rows.items():
            chosen = recipe.with_settings([f"strategy={json.dumps(strategy)}", f"seed={seed}"])
            found.append(Cell(part, row, chosen, held_out))
    return found


@dataclass
class Found:
    """Runs by part and row, seeds in order; a part whose first row has no run yet is left out."""

    parts: dict[str, dict[str, list[Run]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def all(self) -> list[Run]:
        return [run for part in self.parts.values() for runs in part.values() for run in runs]

    def facts(self) -> list[str]:
        """When and where the runs were made and how long they took."""
        walls = [run.wall for run in self.all() if run.wall]
        dates = sorted({str(wall["date"])[:10] for wall in walls})
        minutes = sum(float(wall["wall_seconds"]) for wall in walls) / 60
        span = " to ".join([dates[0], dates[-1]] if len(dates) > 1 else dates)
        where = "; ".join(sorted({str(wall["machine"]) for wall in walls if wall.get("machine")}))
        said = f"{len(walls)} runs, made {span} on {where}; their wall times, one core each, add up to"
        return [f"{said} {minutes:.1f} minutes."] if walls else []


def finished_run(cell: Cell, options: Options) -> Run | None:
    """The run from its record; from its directory, of which a record is then made; or None if it is missing."""
    records = RunRecords(options.records / options.name)
    with suppress(RunError):  # it is damaged, and is made again
        found = records.read(cell.part, cell.row, cell.key)
        if found is not None:
            return found
    with suppress(RunError):  # it has not been started, or has been interrupted
        made = Run.read(cell.job(options.runs / options.name).directory)
        if made.finished:  # a run that diverged is finished: it would diverge again
            records.write(cell.part, cell.row, cell.key, made)
            return records.read(cell.part, cell.row, cell.key)
    return None


def run(wanted: Sequence[Cell], options: Options) -> Found:
    """Make the missing runs, several at a time, and read all of them; with `options.resume` off, only read."""
    console = Console(stderr=True, highlight=False)
    there = [finished_run(cell, options) for cell in wanted]
    todo = [cell for cell, one in zip(wanted, there, strict=True) if one is None]
    failures: dict[str, str] = {}
    if options.resume:
        if len(todo) < len(wanted):
            console.print(f"{len(wanted) - len(todo)} of {len(wanted)} runs are finished already.")
        failures = make(todo, options, console)
        there = [finished_run(cell, options) if one is None else one for cell, one in zip(wanted, there, strict=True)]
    found = Found()
    references = {cell.part: cell.row for cell in reversed(wanted)}
    started = {cell.part for cell, one in zip(wanted, there, strict=True) if one and cell.row == references[cell.part]}
    for cell, one in zip(wanted, there, strict=True):
        if one is not None and cell.part in started:
            found.parts.setdefault(cell.part, {}).setdefault(cell.row, []).append(one)
        elif one is None and options.resume:
            found.failures.append(f"{cell.label}: {failures.get(cell.label, 'it is not finished')}")
    return found


def make(todo: Sequence[Cell], options: Options, console: Console) -> dict[str, str]:
    """Make runs, each kept as soon as it is finished; returns the errors of those that failed, by label."""
    runs = options.runs / options.name
    by_label = {cell.label: cell for cell in todo}
    for name in {cell.recipe.data.name for cell in todo if cell.held_out}:
        validation_split.write(name, _split(runs))
    jobs = [cell.job(runs) for cell in todo]
    if not options.jobs:
        failures = {}
        for job in jobs:
            error = _simulate(job)
            if error is None:
                finished_run(by_label[job.label], options)
            else:
                failures[job.label] = error
        return failures
    with watching(console, runs=len(todo), part=0.1) as watcher:
        listener = _Keeping(watcher, by_label, options)
        simulate = functools.partial(train_run.simulate, checkpoint_seconds=CHECKPOINT_SECONDS)
        return sweep.run(jobs, processes=options.jobs, simulate=simulate, listener=listener)


class _Keeping:
    """Listens to a sweep and makes the record of each run that ends."""

    def __init__(self, watcher: sweep.ProgressListener, by_label: Mapping[str, Cell], options: Options) -> None:
        self._watcher, self._by_label, self._options = watcher, by_label, options

    def started(self, key: str) -> None:
        self._watcher.started(key)

    def progressed(self, key: str, progress: train_run.Progress) -> None:
        self._watcher.progressed(key, progress)

    def ended(self, key: str, error: str | None) -> None:
        if error is None:
            finished_run(self._by_label[key], self._options)
        self._watcher.ended(key, error)


def _simulate(job: sweep.Job) -> str | None:
    """Run in this process; returns the error, or None."""
    try:
        train_run.simulate(job.recipe, job.directory, checkpoint_seconds=CHECKPOINT_SECONDS)
    except WeightGradError as error:
        return f"{type(error).__name__}: {error}"
    return None


def rows(part: Mapping[str, Sequence[Run]]) -> list[Row]:
    """A part as numbers: the accuracy, time and bytes of each row, compared with `baseline` or with the first row."""
    if not part:
        return []
    made = comparison.compare(part)
    found: list[Row] = []
    for one in made.rows:
        runs = part[one.strategy]
        steps = statistics.fmean(run.summary["steps"] for run in runs)
        step_ms = 1000 * one.virtual_seconds / steps if steps else None
        losses = [run.summary["loss"] for run in runs if run.summary["loss"] is not None]
        found.append(
            {
                "row": one.strategy + ("†" if one.diverged else ""),
                "name": one.strategy,
                "seeds": len(one.seeds),
                "diverged": one.diverged,
                "accuracy": None if one.accuracy_mean is None else 100 * one.accuracy_mean,
                "spread": 100 * one.accuracy_std if len(one.seeds) > 1 else None,
                "points": None if one.strategy == made.reference else one.difference_points,
                "loss": statistics.fmean(losses) if losses else None,
                "seconds": one.virtual_seconds,
                "step_ms": step_ms,
                "speedup": (found[0]["step_ms"] if found else step_ms) / step_ms if step_ms else None,
                "seconds_to": one.seconds_to_accuracy,
                "speedup_to": one.speedup_to_accuracy,
                "reached": one.reached,
                "wan_mb": one.wan_bytes / 1e6,
                "lan_mb": one.lan_bytes / 1e6,
                "ratio": None if one.diverged else one.wan_ratio,
                "ratio_to": one.wan_ratio_to_accuracy,
                "waiting": 100 * one.waiting_share,
            }
        )
    return found


def table(name: str, about: str, shown: list[tuple[str, str, str]], part: Mapping[str, Sequence[Run]]) -> ResultTable:
    """A part as a table, with a note about runs that diverged."""
    made = ResultTable(name, name, about, shown, rows(part))
    lost = [f"{row['name']} {row['diverged']} of {row['seeds']}" for row in made.rows if row["diverged"]]
    if lost:
        made.notes.append(f"† diverged, and counts with its last evaluation, if it had one: {', '.join(lost)}.")
    return made


COLUMNS = {
    "row": ("", "row", "{}"),
    "accuracy": ("accuracy %", "accuracy", "{:.2f}"),
    "spread": ("±", "spread", "{:.2f}"),
    "points": ("Δ points", "points", "{:+.2f}"),
    "loss": ("loss", "loss", "{:.3f}"),
    "seconds": ("seconds", "seconds", "{:.4g}"),
    "step_ms": ("ms a step", "step_ms", "{:.4g}"),
    "speedup": ("speedup, same steps", "speedup", "{:.2f}"),
    "seconds_to": ("seconds to accuracy", "seconds_to", "{:.4g}"),
    "speedup_to": ("speedup, same accuracy", "speedup_to", "{:.2f}"),
    "reached": ("seeds that reached it", "reached", "{:d}"),
    "wan_mb": ("WAN MB", "wan_mb", "{:.4g}"),
    "ratio": ("fewer bytes", "ratio", "{:.4g}"),
    "ratio_to": ("fewer bytes, same accuracy", "ratio_to", "{:.4g}"),
    "waiting": ("waiting %", "waiting", "{:.1f}"),
}


def columns(*names: str, first: str = "strategy") -> list[tuple[str, str, str]]:
    """The columns of a table of `rows`, after the name of the row."""
    return [(first, "row", "{}"), *(COLUMNS[name] for name in names)]


def row_difference(part: Mapping[str, Sequence[Run]], row: str, reference: str, tested: int) -> Difference | None:
    """The difference of two rows of a part in accuracy; None if no seed has both."""
    return paired(part.get(row, ()), part.get(reference, ()), tested)


def paired(runs: Sequence[Run], references: Sequence[Run], tested: int) -> Difference | None:
    """The difference in accuracy over the seeds that both lists have; None if they have none in common."""
    both = [{run.seed: run.summary["accuracy"] for run in group} for group in (runs, references)]
    seeds = [s for s in both[0] if both[0][s] is not None and both[1].get(s) is not None]
    return difference([both[0][s] for s in seeds], [both[1][s] for s in seeds], tested) if seeds else None

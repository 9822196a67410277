"""The simulated runs of a table: made where they are missing, read back, and compared.

    runs/tables/NAME/PART/ROW-HASH/seed-0

The hash is that of the recipe and of the strategy as it is now, so a directory belongs to exactly what made it. A
finished run is not made again, and a run of an older strategy or plan is left alone.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from result_table import ResultTable, Row
from rich.console import Console
from tables import Difference, Options, difference

from weightgrad.errors import RunError, WeightGradError
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report import comparison, sweep
from weightgrad.lab.report.choices import Choice, safe_name
from weightgrad.lab.report.progress import watching
from weightgrad.lab.report.runs import Run
from weightgrad.lab.run import simulation as train_run

Strategy = str | Mapping[str, Any]  # a name, or a mapping with a name and changes


@dataclass(frozen=True)
class Cell:
    """One run: the part and the row of the table that it belongs to, and the recipe with its seed."""

    part: str
    row: str
    recipe: Recipe

    def job(self, runs: Path) -> sweep.Job:
        own = {**self.recipe.dump(), "seed": 0, "row": train_run.chosen_strategy(self.recipe).to_dict()}
        mark = hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).hexdigest()[:8]
        seed = self.recipe.seed
        directory = runs / safe_name(self.part) / f"{safe_name(self.row)}-{mark}" / f"seed-{seed}"
        return sweep.Job(Choice(f"{self.part}, {self.row}"), seed, self.recipe, directory)


def cells(part: str, recipe: Recipe, rows: Mapping[str, Strategy], seeds: int) -> list[Cell]:
    """The runs of every row, seed by seed."""
    found = []
    for seed in range(seeds):
        for row, strategy in rows.items():
            chosen = recipe.with_settings([f"strategy={json.dumps(strategy)}", f"seed={seed}"])
            found.append(Cell(part, row, chosen))
    return found


@dataclass
class Found:
    """Runs by part and row, seeds in order."""

    parts: dict[str, dict[str, list[Run]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def all(self) -> list[Run]:
        return [run for part in self.parts.values() for runs in part.values() for run in runs]

    def facts(self) -> list[str]:
        """When the runs were made and how long they took."""
        walls = [run.wall for run in self.all() if run.wall]
        dates = sorted({str(wall["date"])[:10] for wall in walls})
        minutes = sum(float(wall["wall_seconds"]) for wall in walls) / 60
        span = " to ".join([dates[0], dates[-1]] if len(dates) > 1 else dates)
        return (
            [f"{len(walls)} runs, made {span}; their wall times, one core each, add up to {minutes:.1f} minutes."]
            if walls
            else []
        )


def finished(job: sweep.Job) -> bool:
    """Whether its directory holds the whole run."""
    try:
        return Run.read(job.directory).finished
    except RunError:
        return False


def run(wanted: Sequence[Cell], options: Options) -> Found:
    """Make the missing runs, several at a time, and read all of them."""
    console = Console(stderr=True, highlight=False)
    jobs = [cell.job(options.runs / options.name) for cell in wanted]
    todo = [job for job in jobs if not finished(job)]
    if len(todo) < len(jobs):
        console.print(f"{len(jobs) - len(todo)} of {len(jobs)} runs are finished already.")
    failures: dict[str, str] = {}
    if options.jobs:
        with watching(console, runs=len(todo), part=0.5) as watcher:
            failures = sweep.run(todo, processes=options.jobs, simulate=train_run.simulate, listener=watcher)
    else:
        failures = {job.label: error for job in todo if (error := _simulate(job))}
    found = Found()
    for cell, job in zip(wanted, jobs, strict=True):
        if finished(job):  # a run that diverged is finished too: it would diverge again
            part = found.parts.setdefault(cell.part, {})
            part.setdefault(cell.row, []).append(Run.read(job.directory))
        else:
            found.failures.append(f"{job.label}: {failures.get(job.label, 'it is not finished')}")
    return found


def _simulate(job: sweep.Job) -> str | None:
    """Run in this process; returns the error, or None."""
    try:
        train_run.simulate(job.recipe, job.directory)
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

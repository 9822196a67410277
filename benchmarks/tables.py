"""What every table_*.py shares: its command line, claims that numbers decide, and a dated Markdown + JSON pair.

A table's plan is a frozen dataclass; each of its whole numbers is an option (`steps` is `--steps`). Without
`--quick` the pair goes to `benchmarks/results/YYYY-MM-DD-NAME.md`; with it, never.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import os
import shlex
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from field_sheet import Sheet

from weightgrad import kernels
from weightgrad.errors import RecipeError
from weightgrad.report.comparison_table import seeds_text
from weightgrad.report.machine import measured_on

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results"
P = TypeVar("P")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where a table's files go, and how it is made."""

    name: str
    command: str
    quick: bool
    out: Path  # the dated pair
    runs: Path  # what it is made of, so that an interrupted table goes on
    jobs: int = 1  # runs at a time; 0: one, in this very process


def read(plan: P, quick: P, about: str, argv: Sequence[str] | None = None) -> tuple[P, Options]:
    """The plan as the command line changes it, and the options."""
    script = Path(sys.argv[0]).name
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a minute, to see that it works; nothing to conclude from")
    parser.add_argument("--out", type=Path, help="where the result goes [benchmarks/results; quick: runs/tables-quick]")
    parser.add_argument("--runs", type=Path, help="directory of what it is made of [runs/tables; quick: OUT/runs]")
    parser.add_argument(
        "--jobs", type=int, help="runs at a time, each on one thread [all cores; quick: 0, no processes]"
    )
    numbers = [one for one in dataclasses.fields(plan) if isinstance(getattr(plan, one.name), int)]  # type: ignore[arg-type]
    for one in numbers:
        said = f"{one.metadata.get('help', one.name.replace('_', ' '))} [{getattr(plan, one.name)}]"
        parser.add_argument(f"--{one.name.replace('_', '-')}", type=int, help=said)
    given = parser.parse_args(argv)
    out = given.out or (Path("runs/tables-quick") if given.quick else RESULTS)
    if given.quick and out.resolve() == RESULTS.resolve():
        parser.error("--quick is nothing to conclude from: it does not write to benchmarks/results")
    changes = {one.name: getattr(given, one.name) for one in numbers if getattr(given, one.name) is not None}
    wrong = [name for name, value in changes.items() if value < 1]
    jobs = (0 if given.quick else os.cpu_count() or 1) if given.jobs is None else given.jobs
    if wrong or jobs < 0:
        parser.error(f"--{(wrong or ['jobs'])[0].replace('_', '-')} must be at least {1 if wrong else 0}")
    options = Options(
        name=script.removeprefix("table_").removesuffix(".py"),
        command=shlex.join(["python", f"benchmarks/{script}", *(sys.argv[1:] if argv is None else argv)]),
        quick=given.quick,
        out=out,
        runs=given.runs or (out / "runs" if given.quick else Path("runs/tables")),
        jobs=jobs,
    )
    try:
        return dataclasses.replace(quick if given.quick else plan, **changes), options  # type: ignore[type-var]
    except RecipeError as error:  # numbers that do not go together, as the plan says
        parser.error(str(error))


def number(default: int, text: str) -> Any:
    """A field of a plan that is an option."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Claim:
    """Something published, or hoped for, and what the numbers here say to it. `holds` None: they cannot tell."""

    what: str
    holds: bool | None
    found: str

    def line(self) -> str:
        """For a list."""
        word = {True: "Holds", False: "Does not hold", None: "Cannot be told"}[self.holds]
        return f"- **{word}**: {self.what} {self.found}"


@dataclass(frozen=True)
class Difference:
    """Of two rows' accuracies, in points, with two standard errors of it."""

    points: float
    twice: float
    seeds: int = 1

    def text(self) -> str:
        """With what it rests on: one seed says nothing about the next."""
        return f"{self.points:+.2f} ± {self.twice:.2f} points, {seeds_text(self.seeds)}"

    def above(self, limit: float) -> bool | None:
        """Whether it is more than that; None: within two standard errors of it."""
        if abs(self.points - limit) <= self.twice:
            return None
        return self.points > limit


def difference(row: Sequence[float], reference: Sequence[float], tested: int) -> Difference:
    """Of fractions, seed by seed; the error is the larger of the seeds' and of that of so many test samples."""
    pairs = [100 * (a - b) for a, b in zip(row, reference, strict=True)]
    share = min(max(statistics.fmean([*row, *reference]), 0.01), 0.99)
    error = 100 * math.sqrt(2 * share * (1 - share) / tested / len(pairs))
    if len(pairs) > 1:
        error = max(error, statistics.stdev(pairs) / math.sqrt(len(pairs)))
    return Difference(statistics.fmean(pairs), 2 * error, len(pairs))


@dataclass(kw_only=True)
class Document:
    """A result: what was asked, what holds, the tables, and what they rest on."""

    title: str
    rests_on: list[str]  # steps, seeds, settings here, and those of the published table
    sheets: list[Sheet]
    claims: list[Claim]
    measured: list[str]  # what is measured and what is modelled
    charts: dict[str, str] = field(default_factory=dict)  # name: SVG
    failures: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)  # more of them, for the JSON file

    def markdown(self, options: Options, stem: str) -> str:
        lines = [f"# {self.title}", "", "```sh", options.command, "```", "", f"{measured_on()}.", ""]
        if options.quick:
            lines += ["**A quick run, to see that it works: nothing can be concluded from its numbers.**", ""]
        lines += [f"- {text}" for text in self.rests_on]
        lines += ["", "## What holds here and what does not", *(claim.line() for claim in self.claims), ""]
        for name in self.charts:
            lines += [f"![{name}]({stem}-{name}.svg)", ""]
        lines += [sheet.markdown() for sheet in self.sheets]
        lines += ["## What is measured and what is modelled", *(f"- {text}" for text in self.measured)]
        if self.failures:
            lines += ["", "## What failed", *(f"- {text}" for text in self.failures)]
        return "\n".join(lines) + "\n"

    def write(self, options: Options) -> list[Path]:
        """The pair and its charts; their paths."""
        stem = f"{datetime.date.today().isoformat()}-{options.name}"
        options.out.mkdir(parents=True, exist_ok=True)
        numbers = {
            "title": self.title,
            "command": options.command,
            "measured_on": measured_on(),
            "quick": options.quick,
            "rests_on": self.rests_on,
            "claims": [dataclasses.asdict(claim) for claim in self.claims],
            "sheets": [sheet.as_dict() for sheet in self.sheets],
            "measured": self.measured,
            "failures": self.failures,
            **self.numbers,
        }
        files = {
            f"{stem}.md": self.markdown(options, stem),
            f"{stem}.json": json.dumps(_plain(numbers), indent=1, allow_nan=False) + "\n",
            **{f"{stem}-{name}.svg": chart for name, chart in self.charts.items()},
        }
        for name, text in files.items():
            (options.out / name).write_text(text, encoding="utf-8")
        return [options.out / name for name in files]


def _plain(value: Any) -> Any:
    """Without what JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inside) for inside in value]
    return value


def main(plan: P, quick: P, about: str, make: Callable[[P, Options], Document]) -> None:
    """Make the table, print it, write it. Interrupted, it says how to go on."""
    chosen, options = read(plan, quick, about)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    torch.set_num_threads(1)
    kernels.set_threads(1)
    try:
        document = make(chosen, options)
    except KeyboardInterrupt:
        print(f"Interrupted. What is finished is in {options.runs}; the same command goes on.", file=sys.stderr)
        sys.exit(130)
    paths = document.write(options)
    print(paths[0].read_text(encoding="utf-8"))
    print("Written: " + ", ".join(map(str, paths)), file=sys.stderr)
    if document.failures:
        sys.exit(1)

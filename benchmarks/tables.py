"""What every table_*.py shares: the command line, claims that numbers decide, and dated Markdown and JSON files.

The plan of a table is a frozen dataclass, and each of its integers is an option (`steps` is `--steps`). Results go to
`benchmarks/results/YYYY-MM-DD-NAME.md`, but never those of `--quick`. `run_all.py` says what a script has to declare so
that its runs can be listed and made over several days.
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

import charts
import torch
from charts import Chart
from result_table import ResultTable

from weightgrad import kernels
from weightgrad.errors import RecipeError
from weightgrad.lab.report.comparison_table import seeds_text
from weightgrad.machine import measured_on

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results"
P = TypeVar("P")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where the files of a table go, and how it is made.

    Attributes:
        name: The name of the table in the names of its files.
        command: The command line, for the document.
        quick: Whether the run is only a test.
        out: The directory of the document.
        runs: The directory of the runs, so that an interrupted table goes on.
        jobs: Runs at a time; 0 runs them one by one in this process.
        resume: Whether missing runs are made; otherwise the table is made of those that there are.
    """

    name: str
    command: str
    quick: bool
    out: Path
    runs: Path
    jobs: int = 1
    resume: bool = True

    @property
    def records(self) -> Path:
        """The directory of the records of finished runs, of all tables."""
        return self.out / "records"


def read(
    plan: P, quick: P, about: str, argv: Sequence[str] | None = None, *, full: P | None = None
) -> tuple[P, Options]:
    """Parse the command line.

    Args:
        plan: The plan without `--quick`.
        quick: The plan with `--quick`.
        about: The docstring of the script.
        argv: The arguments; None takes those of the process.
        full: The plan with `--full`; None if the table has no longer one.

    Returns:
        The plan with the changes of the command line, and the options.
    """
    script = Path(sys.argv[0]).name
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a minute, to see that it works; nothing to conclude from")
    if full is not None:
        size.add_argument("--full", action="store_true", help="the plan of run_all.py, which takes hours or days")
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
    out = output_directory(parser, given, Path("runs/tables-quick"))
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
    chosen = quick if given.quick else plan
    if full is not None and given.full:
        chosen = full
    try:
        return dataclasses.replace(chosen, **changes), options  # type: ignore[type-var]
    except RecipeError as error:  # the plan rejects this combination
        parser.error(str(error))


def output_directory(parser: argparse.ArgumentParser, given: argparse.Namespace, quick: Path) -> Path:
    """Where the document goes: `--out`, or `quick` with `--quick`, or the directory of the kept results."""
    out: Path = given.out or (quick if given.quick else RESULTS)
    if given.quick and out.resolve() == RESULTS.resolve():
        parser.error("--quick is nothing to conclude from: it does not write to benchmarks/results")
    return out


def number(default: int, text: str) -> Any:
    """A field of a plan that is an option, with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Claim:
    """A published or expected result, and what the numbers say about it.

    `holds` is None if they cannot decide; `undecided` is then the verdict, such as an interval.
    """

    what: str
    holds: bool | None
    found: str
    undecided: str = "Cannot be told"

    def line(self) -> str:
        """The claim as an item of a list."""
        word = {True: "Holds", False: "Does not hold", None: self.undecided}[self.holds]
        return f"- **{word}**: {self.what} {self.found}"


@dataclass(frozen=True)
class Difference:
    """The difference of two accuracies in percentage points, with two standard errors."""

    points: float
    twice: float
    seeds: int = 1

    @property
    def interval(self) -> tuple[float, float]:
        """Two standard errors to either side."""
        return self.points - self.twice, self.points + self.twice

    def text(self) -> str:
        """The difference with its error and the number of seeds."""
        return f"{self.points:+.2f} ± {self.twice:.2f} points, {seeds_text(self.seeds)}"

    def above(self, limit: float) -> bool | None:
        """Whether it is more than the limit; None if it is within two standard errors of it."""
        if abs(self.points - limit) <= self.twice:
            return None
        return self.points > limit


def difference(row: Sequence[float], reference: Sequence[float], tested: int) -> Difference:
    """The difference of two lists of accuracies, seed by seed.

    The error is the larger of the error over the seeds and that of `tested` test samples.
    """
    pairs = [100 * (a - b) for a, b in zip(row, reference, strict=True)]
    share = min(max(statistics.fmean([*row, *reference]), 0.01), 0.99)
    error = 100 * math.sqrt(2 * share * (1 - share) / tested / len(pairs))
    if len(pairs) > 1:
        error = max(error, statistics.stdev(pairs) / math.sqrt(len(pairs)))
    return Difference(statistics.fmean(pairs), 2 * error, len(pairs))


@dataclass(kw_only=True)
class Document:
    """The result of a table script.

    Attributes:
        title: The heading.
        rests_on: Steps, seeds and settings, here and in the published table.
        tables: The tables.
        claims: What holds and what does not.
        measured: What is measured and what is modelled.
        charts: The charts by name.
        failures: Runs that failed.
        missing: Runs that are still to be made.
        numbers: More numbers for the JSON file.
    """

    title: str
    rests_on: list[str]
    tables: list[ResultTable]
    claims: list[Claim]
    measured: list[str]
    charts: dict[str, Chart] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def drawn(self) -> dict[str, Chart]:
        """The charts that have data; none without matplotlib."""
        return {name: chart for name, chart in self.charts.items() if charts.available() and not chart.empty}

    def markdown(self, options: Options, stem: str) -> str:
        """The Markdown file; `stem` is the name of the files that it links to."""
        lines = [f"# {self.title}", "", "```sh", options.command, "```", "", f"{measured_on()}.", ""]
        if options.quick:
            lines += ["**A quick run, to see that it works: nothing can be concluded from its numbers.**", ""]
        lines += [f"- {text}" for text in self.rests_on]
        if self.missing:
            lines += ["", "## What is missing", *(f"- {text}" for text in self.missing)]
        lines += ["", "## What holds here and what does not", *(claim.line() for claim in self.claims), ""]
        for name in self.drawn():
            lines += [f"![{name}]({stem}-{name}.svg)", ""]
        lines += [table.markdown() for table in self.tables]
        lines += ["## What is measured and what is modelled", *(f"- {text}" for text in self.measured)]
        if self.failures:
            lines += ["", "## What failed", *(f"- {text}" for text in self.failures)]
        return "\n".join(lines) + "\n"

    def write(self, options: Options) -> list[Path]:
        """Write the Markdown file, the JSON file and the charts, and return their paths."""
        stem = f"{datetime.date.today().isoformat()}-{options.name}"
        options.out.mkdir(parents=True, exist_ok=True)
        numbers = {
            "title": self.title,
            "command": options.command,
            "measured_on": measured_on(),
            "quick": options.quick,
            "rests_on": self.rests_on,
            "claims": [dataclasses.asdict(claim) for claim in self.claims],
            "tables": [table.to_dict() for table in self.tables],
            "measured": self.measured,
            "failures": self.failures,
            "missing": self.missing,
            "charts": {name: chart.to_dict() for name, chart in self.charts.items()},
            **self.numbers,
        }
        files = {
            f"{stem}.md": self.markdown(options, stem),
            f"{stem}.json": json.dumps(_plain(numbers), indent=1, allow_nan=False) + "\n",
            **{f"{stem}-{name}.svg": chart.svg() for name, chart in self.drawn().items()},
        }
        for name, text in files.items():
            (options.out / name).write_text(text, encoding="utf-8")
        return [options.out / name for name in files]


def publish(document: Document, options: Options) -> None:
    """Write the files of a document, print it, and say on stderr where the files are."""
    paths = document.write(options)
    print(paths[0].read_text(encoding="utf-8"))
    if document.charts and not charts.available():
        print("No charts: matplotlib is not installed (pip install '.[bench]').", file=sys.stderr)
    print("Written: " + ", ".join(map(str, paths)), file=sys.stderr)


def _plain(value: Any) -> Any:
    """The value with None in place of infinities and NaN, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inside) for inside in value]
    return value


def prepare_process() -> None:
    """One thread, as every run has, and an orderly end at SIGTERM, so that started processes are ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torch.set_num_threads(1)
    kernels.set_threads(1)


def main(plan: P, quick: P, about: str, make: Callable[[P, Options], Document], *, full: P | None = None) -> None:
    """Run a table script.

    Args:
        plan: The plan without `--quick`.
        quick: The plan with `--quick`.
        about: The docstring of the script.
        make: Makes the document.
        full: The plan with `--full`, which `run_all.py` also takes; None if `plan` is that.
    """
    chosen, options = read(plan, quick, about, full=full)
    prepare_process()
    try:
        document = make(chosen, options)
    except KeyboardInterrupt:
        print(f"Interrupted. What is finished is in {options.records}; the same command goes on.", file=sys.stderr)
        sys.exit(130)
    publish(document, options)
    if document.failures:
        sys.exit(1)

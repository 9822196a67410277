"""`weightgrad compare`: strategies side by side, over several seeds."""

from __future__ import annotations

import json
import shlex
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from weightgrad.errors import RunError
from weightgrad.lab.cli import recipe_argument
from weightgrad.lab.report import comparison, comparison_table, page, ray_sweep, sweep
from weightgrad.lab.report.choices import parse_choices, safe_name
from weightgrad.lab.report.progress import watching
from weightgrad.lab.report.runs import Run
from weightgrad.lab.run import simulation as train_run
from weightgrad.machine import measured_on


class Where(str, Enum):
    """Where the runs of a sweep are made."""

    HERE = "here"
    RAY = "ray"


def compare(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of one that comes along, such as laptop.")],
    strategies: Annotated[
        str, typer.Option(help="Strategies, separated by commas, e.g. baseline,weightgrad,diloco(every=50).")
    ],
    seeds: Annotated[int, typer.Option(help="Number of seeds for each strategy, from 0 on.", min=1)] = 1,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Runs at the same time, each on one thread.", min=1, show_default="1; on Ray, one for each free core"
        ),
    ] = None,
    on: Annotated[
        Where, typer.Option(help="Where to run: processes of this machine, or a Ray cluster (the extra ray).")
    ] = Where.HERE,
    address: Annotated[
        str | None,
        typer.Option(help="The Ray cluster.", show_default="this machine's; without one, a local one is started"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory to write.", show_default="runs/NAME", file_okay=False)
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the recipe; may be repeated."),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            help="The accuracy to measure times to, from 0 to 1.", show_default="99 % of the baseline's", min=0, max=1
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list with one object for each strategy.")
    ] = False,
) -> None:
    """Simulate every strategy with every seed; print accuracy, time to the same accuracy, and traffic."""
    if address is not None and on is not Where.RAY:
        raise RunError(f"--address {address} is that of a Ray cluster; add --on ray, or leave it out")
    if on is Where.RAY:
        ray_sweep.load_ray()
    page.plotly_javascript()  # if it is missing, say so before hours of work
    console = Console(stderr=as_json, highlight=False)
    chosen = recipe_argument.load(recipe, settings)
    directory = out or Path("runs") / safe_name(chosen.name)
    planned = sweep.plan(chosen, parse_choices(strategies), seeds, directory)
    todo = [job for job in planned if not sweep.finished(job)]
    if len(todo) < len(planned):
        console.print(f"{len(planned) - len(todo)} of {len(planned)} runs are already finished.")
    try:
        with watching(console, runs=len(todo), part=0.25) as listener:
            if on is Where.RAY and todo:
                failures = ray_sweep.run(
                    todo, address=address, at_once=jobs, simulate=train_run.simulate, listener=listener
                )
            else:
                failures = sweep.run(todo, processes=jobs or 1, simulate=train_run.simulate, listener=listener)
    except KeyboardInterrupt:
        done = sum(sweep.finished(job) for job in planned)
        text = f"Interrupted. {done} of {len(planned)} runs are finished in {directory}; the same command continues."
        console.print(text, markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
    groups: dict[str, list[Run]] = {job.choice.label: [] for job in planned}
    for job in planned:
        if job.label not in failures:
            groups[job.choice.label].append(Run.read(job.directory))
    command = ["weightgrad", "compare", recipe, "--strategies", strategies, "--seeds", str(seeds)]
    command += ["--on", "ray"] if on is Where.RAY else []
    command += ["--address", address] if address is not None else []
    command += ["--jobs", str(jobs or 1)] if jobs is not None or on is Where.HERE else []
    command += [part for setting in settings or () for part in ("--set", setting)]
    command += ["--out", str(out)] if out else []
    command += ["--target", str(target)] if target is not None else []
    _conclude(groups, directory, console, shlex.join(command), target, failures, as_json=as_json)
    if failures:
        raise typer.Exit(1)


def _conclude(
    groups: dict[str, list[Run]],
    directory: Path,
    console: Console,
    command: str,
    target: float | None,
    failures: dict[str, str],
    *,
    as_json: bool,
) -> None:
    """Print the table, write the files, and print their paths."""
    made = comparison.compare(groups, target=target)
    messages = [f"{label}: {error}" for label, error in failures.items()]
    runs = [run for members in groups.values() for run in members]
    if as_json:
        print(json.dumps(made.as_list(), indent=1))
    elif made.rows:
        console.print(comparison_table.table(made, console.width))
        console.print()
        for note in comparison_table.notes(made):
            console.print(Padding(Text(note, style="dim"), (0, 2), expand=False))
    for text in messages:
        console.print(Text.assemble(("failed  ", "red"), text), soft_wrap=True)
    if not made.rows:
        return
    paths = comparison_table.write(made, runs, directory, command=command, machine=measured_on(), failures=messages)
    paths.append(directory / "report.html")
    page.write(
        {name: runs for name, runs in groups.items() if runs},
        paths[-1],
        target=target,
        command=command,
        skipped=messages,
    )
    console.print("\nWritten:")
    for path in paths:
        console.print(Text(f"  {path}"), soft_wrap=True)

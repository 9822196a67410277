"""`weightgrad validate`: the simulator and the emulator side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightgrad.lab.cli import recipe_argument
from weightgrad.lab.report import validation_table
from weightgrad.lab.report.choices import Choice, parse_choices, safe_name
from weightgrad.lab.run.validation import Validation, ValidationResult, with_links, with_workers


def validate(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of one that comes along, such as laptop.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the recipe; may be repeated."),
    ] = None,
    strategies: Annotated[
        str, typer.Option(help="Strategies, separated by commas.")
    ] = "baseline,qsgd,weightgrad,diloco",
    mbit: Annotated[
        str | None,
        typer.Option(
            help="Link rates in Mbit/s to try, e.g. 20,100,300; needs --rtt.", show_default="the recipe's links"
        ),
    ] = None,
    rtt: Annotated[str | None, typer.Option(help="Round trips in ms to try, e.g. 10,80,200; needs --mbit.")] = None,
    workers: Annotated[
        str, typer.Option(help="Also try sites of so many workers, over the first of the links; '' for none.")
    ] = "2,4",
    steps: Annotated[int, typer.Option(min=10, help="Training steps of every run.")] = 60,
    out: Annotated[
        Path | None, typer.Option(help="Directory to write.", show_default="runs/NAME-validation", file_okay=False)
    ] = None,
    kind: Annotated[
        str, typer.Option(help="Emulated network: auto, root, rootless (namespaces), or modelled (none).")
    ] = "auto",
    delay: Annotated[str, typer.Option(help="What delays packets: auto, netem, or switch (in user space).")] = "auto",
    again: Annotated[bool, typer.Option("--again", help="Emulate nothing; simulate the runs in --out again.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    markdown: Annotated[Path | None, typer.Option(help="Also write the table as Markdown.", dir_okay=False)] = None,
) -> None:
    """Run each strategy in the simulator and in the emulator, and print the simulator's error."""
    chosen = recipe_argument.load(recipe, settings).with_settings(
        [f"training.steps={steps}", f"training.evaluate_every={steps}"]
    )
    console = Console(highlight=False, stderr=as_json)

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    directory = out or Path("runs") / safe_name(f"{chosen.name}-validation")
    work = Validation(chosen, directory, kind, delay, say)
    rows = (
        work.resimulate()
        if again
        else _measure(
            work, parse_choices(strategies), _points(mbit, rtt), [int(count) for count in workers.split(",") if count]
        )
    )
    if as_json:
        print(json.dumps([row.as_dict() for row in rows], indent=1))
    else:
        validation_table.show(rows, console)
    if markdown is not None:
        markdown.write_text(validation_table.markdown(rows))


def _points(mbit: str | None, rtt: str | None) -> Sequence[tuple[float, float] | None]:
    found = [(float(m), float(r)) for m in (mbit or "").split(",") for r in (rtt or "").split(",") if m and r]
    return found or [None]


def _measure(
    work: Validation,
    choices: Sequence[Choice],
    points: Sequence[tuple[float, float] | None],
    workers: Sequence[int],
) -> list[ValidationResult]:
    calibrated, rows = work.calibrate(), []
    runs: list[tuple[int | None, Sequence[tuple[float, float] | None]]] = [(None, points)]
    runs += [(count, points[:1]) for count in workers]
    for count, own_points in runs:
        sized = calibrated if count is None else with_workers(calibrated, count)
        suffix = "" if count is None else f"-{count}-workers"
        fitted = {c: work.fit(sized.with_settings([c.setting]), f"{c.directory}{suffix}") for c in choices}
        for point in own_points:
            for choice, recipe in fitted.items():
                placed = recipe if point is None else with_links(recipe, *point)
                place = f"{choice.directory}-{point[0]:g}mbit-{point[1]:g}ms" if point else choice.directory
                result = work.compare(placed, choice.label, safe_name(f"{place}{suffix}"))
                work.say(validation_table.line(result))
                rows.append(result)
    return rows

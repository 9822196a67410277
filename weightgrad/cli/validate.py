"""`weightgrad validate`: the simulator and the emulator side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightgrad.cli import recipe_argument
from weightgrad.report import validation_table
from weightgrad.report.choices import Choice, parse_choices, safe_name
from weightgrad.train.validate import Comparison, Validation, at


def validate(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of one in recipes/, such as laptop.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe; may be repeated.")
    ] = None,
    strategies: Annotated[str, typer.Option(help="With commas between them.")] = "baseline,qsgd,weightgrad,diloco",
    mbit: Annotated[
        str | None, typer.Option(help="Link speeds to try, e.g. 20,100,300.  [default: the recipe's]")
    ] = None,
    rtt: Annotated[str | None, typer.Option(help="Round trips in ms to try, e.g. 10,80,200.")] = None,
    steps: Annotated[int, typer.Option(min=10, help="Steps of every run.")] = 60,
    out: Annotated[Path | None, typer.Option(help="[default: runs/NAME-validation]", file_okay=False)] = None,
    kind: Annotated[str, typer.Option(help="auto, root, rootless, or modelled.")] = "auto",
    delay: Annotated[str, typer.Option(help="auto, netem, or switch.")] = "auto",
    again: Annotated[bool, typer.Option("--again", help="Emulate nothing: simulate again what is in --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects instead of a table.")] = False,
    markdown: Annotated[Path | None, typer.Option(help="Also write the table as Markdown.", dir_okay=False)] = None,
) -> None:
    """Run each strategy simulated and emulated, and print how far the simulator's clock was off."""
    chosen = recipe_argument.load(recipe, settings).with_settings(
        [f"training.steps={steps}", f"training.evaluate_every={steps}"]
    )
    console = Console(highlight=False, stderr=as_json)

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    directory = out or Path("runs") / safe_name(f"{chosen.name}-validation")
    work = Validation(chosen, directory, kind, delay, say)
    rows = work.again() if again else _measure(work, parse_choices(strategies), _points(mbit, rtt))
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
    work: Validation, choices: Sequence[Choice], points: Sequence[tuple[float, float] | None]
) -> list[Comparison]:
    base, rows = work.calibrated(), []
    fitted = {c: work.fitted(base.with_settings([c.setting]), c.directory) for c in choices}
    for point in points:
        for choice, recipe in fitted.items():
            placed = recipe if point is None else at(recipe, *point)
            place = safe_name(f"{choice.directory}-{point[0]:g}mbit-{point[1]:g}ms" if point else choice.directory)
            row = work.compare(placed, choice.label, place)
            work.say(validation_table.line(row))
            rows.append(row)
    return rows

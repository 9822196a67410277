"""`weightgrad chaos`: a recipe, disturbed at random, and whether anything was lost."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightgrad.cli import recipe_argument
from weightgrad.report import chaos_result, field_progress
from weightgrad.report.choices import parse_choices, safe_name
from weightgrad.train.chaos import SimulatedChaos, replay
from weightgrad.train.chaos_emulated import EmulatedChaos
from weightgrad.train.chaos_verdict import Verdict, all_of


def chaos(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of one in recipes/, such as laptop.")],
    seed: Annotated[int, typer.Option(min=0, help="Decides what happens, where and when.")] = 0,
    events: Annotated[int, typer.Option(min=1, help="How many faults.")] = 100,
    simulated: Annotated[bool, typer.Option("--simulated", help="In virtual time, instead of real processes.")] = False,
    schedules: Annotated[int, typer.Option(min=1, help="So many seeds in a row, from the one given.")] = 1,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe; may be repeated.")
    ] = None,
    strategies: Annotated[
        str | None, typer.Option(help="Names with commas between them, each with every seed.  [default: the recipe's]")
    ] = None,
    kind: Annotated[str, typer.Option(help="auto, root, rootless, or modelled (no namespaces).")] = "auto",
    out: Annotated[Path | None, typer.Option(help="[default: runs/NAME-chaos]", file_okay=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as an object.")] = False,
) -> None:
    """Kill, cut, slow down and delay at random; then say what was lost. Ends with code 1 if anything was."""
    chosen = recipe_argument.load(recipe, settings)
    runs = {c.label: chosen.with_settings([c.setting]) for c in parse_choices(strategies)} if strategies else {}
    named = bool(runs)
    runs = runs or {chosen.strategy.name: chosen}
    directory = out or Path("runs") / safe_name(f"{chosen.name}-chaos")
    console = Console(highlight=False, stderr=as_json)
    options = ["--simulated"] if simulated else ["--kind", kind] if kind != "auto" else []
    options += [text for setting in settings or () for text in ("--set", setting)]
    found: list[Verdict] = []

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    total = schedules * len(runs)
    for label, one in runs.items():
        model = SimulatedChaos.of(one) if simulated else None
        for number in range(seed, seed + schedules):
            place = directory / safe_name(f"{label}-seed-{number}")
            if model is not None:
                verdict = model.run(number, events, out=place, say=say if total == 1 else None)
            else:
                say(f"{label}, seed {number}:")
                with field_progress.watching(console, one.training.steps) as watch:
                    verdict = EmulatedChaos(one, number, events, place, kind, say, watch).run()
            command = replay(recipe, number, events, *options, *(["--strategies", label] if named else []))
            found.append(replace(verdict, strategy=label, command=command))
            if total > 1 and (model is None or not verdict.good or len(found) % max(1, total // 20) == 0):
                say(f"{len(found)} of {total}, {label}, seed {number}: {chaos_result.line(verdict)}")
            if total > 1 and not verdict.good:
                say(f"  {verdict.why}\n  again: {command}")
            elif total > 1 and model is not None:
                shutil.rmtree(place)
    together = all_of(found)
    if as_json:
        bad = [verdict.as_dict() for verdict in found if not verdict.good]
        print(json.dumps({**together.as_dict(), "schedules": total, "failures": bad}, indent=1))
    else:
        chaos_result.show(together, console)
    if not together.good:
        raise typer.Exit(1)

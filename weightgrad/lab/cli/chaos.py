"""`weightgrad chaos`: random faults in a run, and an audit of whether any update was lost."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightgrad.lab.chaos.emulated import EmulatedChaos
from weightgrad.lab.chaos.simulated import SimulatedChaos, replay
from weightgrad.lab.chaos.verdict import Verdict, combine
from weightgrad.lab.cli import recipe_argument
from weightgrad.lab.report import summary
from weightgrad.lab.report.choices import parse_choices, safe_name
from weightgrad.lab.report.progress import watching_deployment


def chaos(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of one that comes along, such as laptop.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random faults.")] = 0,
    events: Annotated[int, typer.Option(min=1, help="Number of faults.")] = 100,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Use the simulator instead of real processes.")
    ] = False,
    schedules: Annotated[int, typer.Option(min=1, help="Number of seeds to run, from --seed on.")] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the recipe; may be repeated."),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(help="Strategies, separated by commas; each with every seed.", show_default="the recipe's"),
    ] = None,
    kind: Annotated[str, typer.Option(help="Network: auto, root, rootless (namespaces), or modelled (none).")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Directory to write.", show_default="runs/NAME-chaos", file_okay=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Kill processes, cut and slow links at random, and check that no update is lost; if one is, exit with 1."""
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
    for label, run in runs.items():
        model = SimulatedChaos.of(run) if simulated else None
        for number in range(seed, seed + schedules):
            place = directory / safe_name(f"{label}-seed-{number}")
            if model is not None:
                verdict = model.run(number, events, out=place, say=say if total == 1 else None)
            else:
                say(f"{label}, seed {number}:")
                with watching_deployment(console, run.training.steps) as watch:
                    verdict = EmulatedChaos(run, number, events, place, kind, say, watch).run()
            command = replay(recipe, number, events, *options, *(["--strategies", label] if named else []))
            found.append(replace(verdict, strategy=label, command=command))
            if total > 1 and (model is None or not verdict.good or len(found) % max(1, total // 20) == 0):
                say(f"{len(found)} of {total}, {label}, seed {number}: {summary.verdict_line(verdict)}")
            if total > 1 and not verdict.good:
                say(f"  {verdict.why}\n  to repeat: {command}")
            elif total > 1 and model is not None:
                shutil.rmtree(place)
    together = combine(found)
    if as_json:
        bad = [verdict.as_dict() for verdict in found if not verdict.good]
        print(json.dumps({**together.as_dict(), "schedules": total, "failures": bad}, indent=1))
    else:
        summary.show_verdict(together, console)
    if not together.good:
        raise typer.Exit(1)

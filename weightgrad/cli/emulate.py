"""`weightgrad emulate`: a recipe as real processes over real, slow links on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightgrad.cli import recipe_argument
from weightgrad.report import field_progress, validation_table
from weightgrad.report.choices import parse_choices, safe_name
from weightgrad.train import emulated, visit
from weightgrad.train.validate import foretold


def emulate(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of one in recipes/, such as laptop.")],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND...]", help="Run this in every site instead of training.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe; may be repeated.")
    ] = None,
    strategies: Annotated[
        str | None, typer.Option(help="Names with commas between them, one run each.  [default: the recipe's]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write.  [default: runs/NAME-STRATEGY-emulated]", file_okay=False)
    ] = None,
    kind: Annotated[str, typer.Option(help="auto, root, rootless, or modelled (no namespaces).")] = "auto",
    delay: Annotated[str, typer.Option(help="auto, netem, or switch (our own, in user space).")] = "auto",
    shell: Annotated[str | None, typer.Option(metavar="HOST", help="Open a shell on this host instead.")] = None,
    paced: Annotated[bool, typer.Option(help="A pass lasts as long as the recipe says.")] = True,
    predict: Annotated[
        bool, typer.Option("--predict", help="Simulate it too, and say how far the simulator was off.")
    ] = False,
) -> None:
    """Run a recipe in network namespaces joined by links with its bandwidth, delay, loss and faults."""
    chosen = recipe_argument.load(recipe, settings)
    wanted = {c.label: chosen.with_settings([c.setting]) for c in parse_choices(strategies)} if strategies else {}
    runs = wanted or {chosen.strategy.name: chosen}
    console = Console(highlight=False)

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    for one in runs.values():
        emulated.check(one)
    with emulated.network(chosen, kind=kind, delay=delay) as wan:
        say(f"{wan.describe()['kind']}: {wan.reason}")
        for link in wan.links:
            say(f"  {link}")
        if shell is not None:
            raise typer.Exit(visit.shell(wan, shell, say))
        if command:
            raise typer.Exit(visit.everywhere(wan, chosen, command, say))
        for check in wan.check():
            say(f"  {check}")
        for name, one in runs.items():
            directory = out or Path("runs") / safe_name(f"{chosen.name}-{name}-emulated")
            directory = directory / safe_name(name) if out and len(runs) > 1 else directory
            say(f"{name}:")
            try:
                with field_progress.watching(console, one.training.steps) as watch:
                    summary = emulated.emulate(one, directory, wan, paced=paced, watch=watch, happened=say)
            except KeyboardInterrupt:
                say(f"Interrupted. Logs and state are in {directory}.")
                raise typer.Exit(130) from None
            field_progress.show(summary, directory, console)
            if predict:
                say(validation_table.judged(foretold(one, directory)))

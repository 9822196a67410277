"""`weightgrad emulate`: a recipe as real processes over emulated links on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightgrad.lab.cli import recipe_argument
from weightgrad.lab.page.watched_run import watched_run
from weightgrad.lab.report import validation_table
from weightgrad.lab.report.choices import parse_choices, safe_name
from weightgrad.lab.report.progress import watching_deployment
from weightgrad.lab.report.summary import show_deployment
from weightgrad.lab.run import emulation, host_commands
from weightgrad.lab.run.validation import check_prediction


def emulate(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of one that comes along, such as laptop.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND...]", help="Run this command in every site instead of training."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the recipe; may be repeated."),
    ] = None,
    strategies: Annotated[
        str | None, typer.Option(help="Strategies, separated by commas; one run each.", show_default="the recipe's")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory to write.", show_default="runs/NAME-STRATEGY-emulated", file_okay=False),
    ] = None,
    kind: Annotated[str, typer.Option(help="Network: auto, root, rootless (namespaces), or modelled (none).")] = "auto",
    delay: Annotated[str, typer.Option(help="What delays packets: auto, netem, or switch (in user space).")] = "auto",
    shell: Annotated[
        str | None, typer.Option(metavar="HOST", help="Open a shell on this host instead of training.")
    ] = None,
    emulate_compute: Annotated[
        bool, typer.Option(help="Make passes last as long as the recipe's compute says.")
    ] = True,
    predict: Annotated[
        bool, typer.Option("--predict", help="Simulate it too, and print the simulator's error.")
    ] = False,
    page: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve a live page there, e.g. 127.0.0.1:7445.")
    ] = None,
) -> None:
    """Run a recipe as real processes over links with the recipe's bandwidth, delay, loss and faults."""
    chosen = recipe_argument.load(recipe, settings)
    wanted = {c.label: chosen.with_settings([c.setting]) for c in parse_choices(strategies)} if strategies else {}
    runs = wanted or {chosen.strategy.name: chosen}
    console = Console(highlight=False)

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    for run in runs.values():
        emulation.check(run)
    with emulation.network(chosen, kind=kind, delay=delay) as wan:
        say(f"{wan.describe()['kind']}: {wan.reason}")
        for link in wan.links:
            say(f"  {link}")
        if shell is not None:
            raise typer.Exit(host_commands.shell(wan, shell, say))
        if command:
            raise typer.Exit(host_commands.run_in_every_site(wan, chosen, command, say))
        for check in wan.check():
            say(f"  {check}")
        for name, run in runs.items():
            directory = out or Path("runs") / safe_name(f"{chosen.name}-{name}-emulated")
            directory = directory / safe_name(name) if out and len(runs) > 1 else directory
            say(f"{name}:")
            try:
                with (
                    watched_run(page, directory, say, name="emulate"),
                    watching_deployment(console, run.training.steps) as watch,
                ):
                    summary = emulation.emulate(
                        run, directory, wan, emulate_compute=emulate_compute, watch=watch, happened=say
                    )
            except KeyboardInterrupt:
                say(f"Interrupted. Logs and checkpoints are in {directory}.")
                raise typer.Exit(130) from None
            show_deployment(summary, directory, console)
            if predict:
                say(validation_table.prediction_text(check_prediction(run, directory)))

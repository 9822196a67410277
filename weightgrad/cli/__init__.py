"""The `weightgrad` command: one file a subcommand, no logic."""

from __future__ import annotations

import sys

import typer

from weightgrad.cli import (
    bench,
    certs,
    chaos,
    codecs,
    compare,
    data,
    doctor,
    emulate,
    inspect,
    launch,
    report,
    serve,
    simulate,
    strategies,
    tour,
    train,
    validate,
)
from weightgrad.errors import WeightGradError

app = typer.Typer(
    help="Train one neural network on data in several data centers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")
app.add_typer(certs.app, name="certs")
app.command("chaos")(chaos.chaos)
app.command("codecs")(codecs.codecs)
app.command("compare")(compare.compare)
app.add_typer(data.app, name="data")
app.command("doctor")(doctor.doctor)
app.command("emulate")(emulate.emulate)
app.command("inspect")(inspect.inspect)
app.command("launch")(launch.launch)
app.command("report")(report.report)
app.command("serve")(serve.serve)
app.command("simulate")(simulate.simulate)
app.command("strategies")(strategies.strategies)
app.command("tour")(tour.tour)
app.command("train")(train.train)
app.command("validate")(validate.validate)


def main() -> None:
    """Run the command line; an error of ours is one line, not a traceback."""
    try:
        app()
    except WeightGradError as error:
        print(f"weightgrad: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)

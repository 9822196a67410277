"""`weightgrad plan`: what a run will take, before anything is rented."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightgrad.errors import PlanError
from weightgrad.lab.cli import recipe_argument
from weightgrad.lab.plan import devices, plan_page, plan_table, prices, process_cost, sources
from weightgrad.lab.plan.plan import make_plan

_OF_MODEL = {
    "sites": "sites",
    "link": "links",
    "input_": "model.options",
    "batch": "training.batch",
    "steps": "training.steps",
    "optimizer": "training.optimizer.name",
    "sharding": "sites.0.sharding",
    "dtype": None,
}  # options that go with --model, and what says the same in a recipe


def _refuse_others(context: typer.Context, *, recipe_given: bool) -> None:
    """Refuse options that would have no effect."""
    given = [name for name in context.params if _is_written(context, name)]
    if not recipe_given and "processes" in given:
        raise PlanError("--processes starts the processes of a recipe, and there is none; wanted a recipe")
    if not recipe_given and "settings" in given:
        raise PlanError("--set changes a recipe, and there is none; --batch, --steps and --optimizer go with --model")
    for name in given if recipe_given else ():
        if name in _OF_MODEL:
            key, option = _OF_MODEL[name], f"--{name.rstrip('_')}"
            instead = "" if key is None else f"; with a recipe, change it: --set {key}=..."
            raise PlanError(f"{option} goes with --model{instead}")


def _is_written(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def plan(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe file, or the name of one in recipes/, such as laptop.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the recipe; may be repeated."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Makes a model, or a pair of model and batch; instead of a recipe."
        ),
    ] = None,
    sites: Annotated[
        str | None, typer.Option(help="With --model: sites and devices, e.g. virginia=8xH100,tokyo=4xA100.")
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SERVER-SITE=RATE,DELAY", help="With --model: e.g. ohio-tokyo=1Gbit/s,80ms; may be repeated."
        ),
    ] = None,
    input_: Annotated[
        str | None, typer.Option("--input", help="With --model: the shape of a sample, e.g. 3x224x224 or 2048:int64.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --model: samples of a worker's step.", show_default="those of the model's own batch, or 1"
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="With --model: steps of the run.")] = 10_000,
    optimizer: Annotated[
        str, typer.Option(help="With --model: sgd, adam, adamw, adagrad, adadelta, lars or muon.")
    ] = "adamw",
    sharding: Annotated[str, typer.Option(help="With --model: none, or fsdp2.")] = "none",
    dtype: Annotated[
        str | None, typer.Option(help="With --model: convert the model, e.g. bfloat16.", show_default="as it is")
    ] = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Compute the activations of each block again for backward.")
    ] = False,
    strategies: Annotated[
        str | None, typer.Option(help="Strategies, separated by commas; 'all' for every one.", show_default="the usual")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Samples that the time is asked for.", show_default="those of the run")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="The same in tokens, where a sample is a text.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time a few real steps on this machine, and play real gradients through.")
    ] = False,
    processes: Annotated[
        bool,
        typer.Option(
            "--processes",
            help="With a recipe: emulate it for a moment with each strategy, and count what processes cost here.",
        ),
    ] = False,
    price: Annotated[
        list[str] | None, typer.Option(help="Dollars for 10^9 bytes: 0.02 for all, or tokyo=0.114; may be repeated.")
    ] = None,
    price_file: Annotated[Path | None, typer.Option("--prices", help="A table of prices.", dir_okay=False)] = None,
    device_file: Annotated[Path | None, typer.Option("--devices", help="A table of devices.", dir_okay=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    page: Annotated[Path | None, typer.Option(help="Also write a page with timelines.", dir_okay=False)] = None,
) -> None:
    """Predict time, memory, bytes and dollars of a run, without training, and say which strategy to take."""
    if (recipe is None) == (model is None):
        both = "" if recipe is None else f"a recipe ({recipe}) and --model {model} were given; "
        raise PlanError(f"{both}wanted a recipe, or --model with --sites and --link")
    _refuse_others(context, recipe_given=recipe is not None)
    known = devices.load(device_file)
    if recipe is not None:
        chosen = recipe_argument.load(recipe, settings)
        source = sources.of_recipe(chosen, measure=measure, checkpointing=checkpointing)
    else:
        assert model is not None
        given = sources.ModelArguments(
            model=model,
            sites=sites,
            links=tuple(link or ()),
            input=input_,
            batch=batch,
            steps=steps,
            optimizer=optimizer,
            sharding=sharding,
            dtype=dtype,
            checkpointing=checkpointing,
        )
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():  # what the model prints
            source = sources.of_model(given, known, measure=measure)
    console = Console(highlight=False, stderr=as_json)
    overheads = None
    if processes and source.recipe is not None:
        recipes = sources.recipes_of(strategies, source.recipe)
        overheads = process_cost.overheads(recipes, lambda line: console.print(line, markup=False, soft_wrap=True))
    places = [source.scenario.server, *(site.name for site in source.scenario.sites)]
    wanted = sources.strategies_of(strategies, source)
    with console.status("") as status:
        found = make_plan(
            source.scenario,
            source.cost,
            wanted,
            times=source.times,
            devices=source.devices,
            prices=prices.read(price_file, price or (), places=places),
            samples=source.samples(samples, tokens),
            task=source.task,
            overheads=overheads,
            watch=lambda name: status.update(f"playing {name} through"),
        )
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        plan_table.show(found, console)
    if page is not None:
        plan_page.write(found, page)
        console.print(f"Timelines are in {page}.", markup=False, soft_wrap=True)

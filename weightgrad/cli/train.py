"""`weightgrad train`: a site's workers, for recipes that need no script."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from weightgrad.cli import recipe_argument
from weightgrad.train import field


def train(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of one in recipes/.")],
    site: Annotated[str, typer.Option(help="Which of the recipe's sites this is.")],
    server: Annotated[str, typer.Option(help="HOST:PORT of the global server.")] = "127.0.0.1:7443",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe; may be repeated.")
    ] = None,
    credentials: Annotated[Path | None, typer.Option(help="Directory of the site's certificates.")] = None,
    state: Annotated[Path | None, typer.Option(help="Where the site keeps what it needs after a crash.")] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints of the site.")] = 50,
    insecure: Annotated[bool, typer.Option(help="No certificates; for a server on this machine only.")] = False,
    patience: Annotated[float, typer.Option(help="Seconds to wait for a server that is not there yet.")] = 60.0,
    first_base: Annotated[
        str | None,
        typer.Option(metavar="CODEC", help="A late site is sent its first base in this, such as qsgd(bits=8)."),
    ] = None,
    paced: Annotated[
        bool, typer.Option("--paced", help="A pass lasts as long as the recipe's compute says; for emulations.")
    ] = False,
) -> None:
    """Train as one site: torchrun --nproc-per-node N -m weightgrad train RECIPE --site NAME --server HOST:PORT."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
    done = field.train(
        recipe_argument.load(recipe, settings),
        site,
        server,
        credentials=credentials,
        insecure=insecure,
        state=state,
        checkpoint_every=checkpoint_every,
        patience=patience,
        paced=paced,
        first_base=first_base,
    )
    if done.lan.first:
        logging.info("%s has finished after %d steps", site, done.steps)

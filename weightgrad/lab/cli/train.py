"""`weightgrad train`: one worker of a site, for recipes that need no training script."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from weightgrad.lab.cli import recipe_argument
from weightgrad.lab.run import deployment


def train(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of one that comes along.")],
    site: Annotated[str, typer.Option(help="Name of this site in the recipe.")],
    server: Annotated[str, typer.Option(help="HOST:PORT of the global server.")] = "127.0.0.1:7443",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the recipe; may be repeated."),
    ] = None,
    credentials: Annotated[Path | None, typer.Option(help="Directory of the site's certificates.")] = None,
    state: Annotated[
        Path | None, typer.Option(help="Directory of the site's checkpoints; a restarted site continues from there.")
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = 50,
    insecure: Annotated[bool, typer.Option(help="No certificates; for a server on this machine only.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a server that is not there yet.")] = 60.0,
    reconnect: Annotated[
        float,
        typer.Option(min=1.0, help="Seconds in training to wait for a server that has gone away; then the site ends."),
    ] = 3600.0,
    download_codec: Annotated[
        str | None,
        typer.Option(
            metavar="CODEC", help="Codec in which a site that joins late receives the model, e.g. qsgd(bits=8)."
        ),
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(help="HOST:PORT for the site's /metrics and /healthz; no TLS, keep it local.")
    ] = None,
    emulate_compute: Annotated[
        bool,
        typer.Option("--emulate-compute", help="Make passes last as long as the recipe's compute says."),
    ] = False,
) -> None:
    """Train as one site: torchrun --nproc-per-node N -m weightgrad train RECIPE --site NAME --server HOST:PORT."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
    done = deployment.train(
        recipe_argument.load(recipe, settings),
        site,
        server,
        credentials=credentials,
        insecure=insecure,
        state=state,
        checkpoint_every=checkpoint_every,
        timeout=timeout,
        reconnect=reconnect,
        emulate_compute=emulate_compute,
        download_codec=download_codec,
        metrics=metrics,
    )
    if done.group.first:
        logging.info("%s finished after %d steps", site, done.steps)

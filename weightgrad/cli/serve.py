"""`weightgrad serve`: the global server."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Annotated

import typer

from weightgrad import units
from weightgrad.cli import recipe_argument
from weightgrad.errors import StrategyError
from weightgrad.ledger import Ledger
from weightgrad.runtime import health
from weightgrad.runtime.credentials import Credentials
from weightgrad.runtime.server import FieldServer, ServeOptions
from weightgrad.train import field
from weightgrad.wan.guard import Guard


def serve(
    recipe: Annotated[
        str, typer.Argument(help="A recipe file, or the name of one in recipes/: its sites and strategy.")
    ],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe; may be repeated.")
    ] = None,
    credentials: Annotated[
        Path | None, typer.Option(help="Directory of the server's certificates (`weightgrad certs init`).")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="Where the base is kept; a server that starts again goes on from there.")
    ] = None,
    listen: Annotated[str, typer.Option(help="HOST:PORT for the sites.")] = "0.0.0.0:7443",
    metrics: Annotated[str, typer.Option(help="HOST:PORT for /metrics and /healthz; no TLS, keep it local.")] = (
        "127.0.0.1:7444"
    ),
    out: Annotated[Path | None, typer.Option(help="Where to write ledger.jsonl and the final base.")] = None,
    until_finished: Annotated[bool, typer.Option(help="End when every site has finished.")] = False,
    insecure: Annotated[bool, typer.Option(help="No certificates and no encryption; on this machine only.")] = False,
    max_message: Annotated[str, typer.Option(help="What a site may send at once; more than the model.")] = "1 GB",
    refuse_norm: Annotated[
        float, typer.Option(help="Refuse updates this many times larger than any of the site's last; 0: never.")
    ] = 20.0,
) -> None:
    """Join the sites of a recipe: take their updates, move the base, answer. Goes on after a crash by itself."""
    chosen = recipe_argument.load(recipe, settings)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
    if insecure and not listen.startswith(("127.", "localhost", "[::1]")):
        raise StrategyError(f"--insecure listens on this machine only; not on {listen}. Use 127.0.0.1:PORT")
    if credentials is None and not insecure:
        raise StrategyError("serve needs --credentials DIR (make them with `weightgrad certs init`), or --insecure")
    if insecure:
        logging.warning("INSECURE: no certificates, no encryption. Anybody on this machine can join.")
    found = Credentials.load(credentials, server=True) if credentials is not None and not insecure else None
    book = None
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        book = Ledger(out / "ledger.jsonl", append=True)
    options = ServeOptions(
        listen=listen,
        state=state,
        out=out,
        until_finished=until_finished,
        max_message=units.size(max_message),
        guard=Guard(factor=refuse_norm) if refuse_norm > 0 else None,
    )
    server = FieldServer(field.house(chosen), options, found, book)
    page = health.serve(metrics, server.metrics, server.status)
    logging.info("metrics and health on port %d", page.port)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    try:
        server.run()
    finally:
        page.stop()
        if book is not None:
            book.close()

"""`weightgrad serve`: the global server."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from weightgrad.core.optimizers.spec import allow_optimizer
from weightgrad.core.server.guard import Guard
from weightgrad.errors import RecipeError, RunError, StrategyError
from weightgrad.event_log import EventLog
from weightgrad.lab.cli import recipe_argument
from weightgrad.lab.page.watched_run import watched_run
from weightgrad.lab.recipes import site_list
from weightgrad.lab.recipes.document import Document
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.recipes.site_list import SiteList
from weightgrad.lab.report.choices import parse_choices
from weightgrad.lab.run import deployment
from weightgrad.runtime import health
from weightgrad.runtime.security.credentials import Credentials, Revoked
from weightgrad.runtime.security.tls_check import is_loopback
from weightgrad.runtime.server.global_server import GlobalServer, ServeOptions
from weightgrad.runtime.server.group import ServerGroup
from weightgrad.runtime.server.peer_check import PeerCheck
from weightgrad.runtime.server.roster import Roster
from weightgrad.runtime.server.worker import ServerWorker
from weightgrad.runtime.transport.grpc_server import GrpcServer


def serve(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe file, or the name of one that comes along: its sites and strategy.")
    ] = None,
    sites: Annotated[
        str | None, typer.Option(metavar="NAME,NAME", help="Without a recipe: the names of the sites that may join.")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(help="Without a recipe: the strategy, e.g. auto or diloco(every=50).", show_default="auto"),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe; may be repeated.")
    ] = None,
    credentials: Annotated[
        Path | None, typer.Option(help="Directory of the server's certificates (`weightgrad certs init`).")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="Directory of the checkpoints; a server that starts again continues from there.")
    ] = None,
    listen: Annotated[str, typer.Option(help="HOST:PORT for the sites.")] = "0.0.0.0:7443",
    metrics: Annotated[str, typer.Option(help="HOST:PORT for /metrics and /healthz; no TLS, keep it local.")] = (
        "127.0.0.1:7444"
    ),
    out: Annotated[Path | None, typer.Option(help="Where to write events.jsonl and the final global model.")] = None,
    until_finished: Annotated[bool, typer.Option(help="End when every site has finished.")] = False,
    insecure: Annotated[bool, typer.Option(help="No certificates and no encryption; on this machine only.")] = False,
    advertise: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of every server process, separated by commas, if sites reach them at other addresses."
        ),
    ] = None,
    optimizer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:CLASS",
            help="An optimizer that is not torch's own, for strategies that share gradients; may be repeated.",
        ),
    ] = None,
    refuse_norm: Annotated[
        float,
        typer.Option(help="Refuse updates this many times larger than usual for the other sites; 0: never."),
    ] = 20.0,
    most_share: Annotated[
        float,
        typer.Option(
            help="From three sites on, count what a site adds only up to this share of what the others add together."
        ),
    ] = 0.75,
    max_parameters: Annotated[
        int | None,
        typer.Option(help="The largest model that a site may bring; default: what half of the memory is enough for."),
    ] = None,
    first_site: Annotated[
        str | None,
        typer.Option(help="The site that sends the first global model; default: one that a majority agrees with."),
    ] = None,
    max_ranks: Annotated[
        int, typer.Option(min=1, help="Ranks that a site may have; each has connections and memory of its own.")
    ] = 256,
    page: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Serve a live page there, e.g. 127.0.0.1:7445; needs --out."),
    ] = None,
) -> None:
    """Run the global server for the sites of a recipe, or for --sites: aggregate their updates, send the results."""
    served = _served(recipe, sites, strategy, settings)
    near = is_loopback(listen)
    config = (
        deployment.run_config(served) if isinstance(served, Recipe) else deployment.listed_config(served, near=near)
    )
    for path in optimizer or ():
        allow_optimizer(path)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
    if page is not None and out is None:
        raise StrategyError("--page shows the event log of --out DIR; give --out too")
    if insecure and not is_loopback(listen):
        raise StrategyError(f"--insecure is for this machine only, not for {listen}; use --listen 127.0.0.1:PORT")
    if credentials is None and not insecure:
        raise StrategyError("serve needs --credentials DIR (make them with `weightgrad certs init`), or --insecure")
    if insecure:
        logging.warning("INSECURE: no certificates, no encryption. Anybody on this machine can join.")
    found = Credentials.load(credentials, server=True) if credentials is not None and not insecure else None
    events = None
    first = int(os.environ.get("RANK", "0")) == 0
    os.umask(0o077)  # the model and what sites did are nobody else's
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make the directory {out}: {error.strerror}; choose another for --out") from None
        events = EventLog(out / "events.jsonl", append=True) if first else None
        if first and not (out / "recipe.yaml").exists():  # `launch` writes it itself; a page shows what it says
            (out / "recipe.yaml").write_text(served.to_yaml())
    group = ServerGroup()
    if group.spans_machines and advertise is None:
        raise StrategyError("the server's processes are on several machines; give --advertise an address for each rank")
    own = None if state is None else state / f"process-{group.number}"
    transport = GrpcServer(
        _port_of(listen, group.number), credentials=found.for_server() if found is not None else None
    )
    logging.info("listening on port %d", transport.port)
    server: GlobalServer | ServerWorker
    monitor: health.HealthServer | None = None
    if group.number:
        revoked = Revoked(found.directory / "revoked.txt") if found is not None else None
        peers = PeerCheck(Roster(config.sites, bit_s=config.bit_s), secure=found is not None, revoked=revoked)
        server = ServerWorker(
            *(config.strategy_for, config.seed, transport, transport.port, peers.check, group),
            state=own,
            out=out,
            roster=peers.roster,
        )
    else:
        options = ServeOptions(
            state=own,
            out=out,
            until_finished=until_finished,
            guard=Guard(factor=refuse_norm, share=most_share, sizes=_sizes(served)) if refuse_norm > 0 else None,
            advertise=tuple(advertise.split(",")) if advertise is not None else None,
            max_parameters=max_parameters,
            first_site=first_site,
            max_ranks=max_ranks,
        )
        server = GlobalServer(config, options, transport, found, events, group=group)
        monitor = health.serve(metrics, server.metrics, server.status)
        logging.info("metrics and health on port %d", monitor.port)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    try:
        with watched_run(page if first else None, out or Path(), logging.info, name="server", certificates=credentials):
            server.run()
    finally:
        if monitor is not None:
            monitor.stop()
        if events is not None:
            events.close()


def _sizes(served: Recipe | SiteList) -> dict[str, float]:
    """How large each site is: its workers, where the recipe says how many it has."""
    return {site.name: float(site.workers) for site in served.site_list} if isinstance(served, Recipe) else {}


def _served(
    recipe: str | None, sites: str | None, strategy: str | None, settings: list[str] | None
) -> Recipe | SiteList:
    """What the server announces: a recipe, or the options that replace one."""
    if recipe is None and sites is None:
        raise RecipeError(
            "serve needs the sites that may join: --sites virginia,tokyo (and perhaps --strategy diloco), or a RECIPE"
        )
    if recipe is not None:
        given = [name for name, value in (("--sites", sites), ("--strategy", strategy)) if value is not None]
        if given:
            raise RecipeError(
                f"found the recipe {recipe!r} and {' and '.join(given)}; a recipe has its own sites and strategy: "
                "give one of the two, or change the recipe with --set strategy=NAME"
            )
        found = site_list.load_served(recipe_argument.find(recipe))
        return found.with_settings(settings) if settings else found
    if settings:
        raise RecipeError("--set changes a recipe, and there is none; write --strategy 'diloco(every=50)' instead")
    assert sites is not None
    chosen = parse_choices("auto" if strategy is None else strategy)
    if len(chosen) != 1:
        raise RecipeError(f"--strategy: found {len(chosen)} strategies in {strategy!r}; a run has one")
    name = "--sites" if strategy is None else "--sites and --strategy"
    listed = {"name": "served", "sites": [name.strip() for name in sites.split(",")]}
    value = Document(name, listed).with_setting(chosen[0].setting).value
    return SiteList.of_document(Document(name, value))


def _port_of(listen: str, process: int) -> str:
    """The address of a server process: the first one listens where it was told, each further one a port higher."""
    host, _, port = listen.rpartition(":")
    return f"{host}:{int(port) + process if int(port) else 0}"

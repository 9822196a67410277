"""`weightgrad sites`: who takes part in a run that is going on."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from weightgrad import units
from weightgrad.cli.operator_options import AsJson, Insecure, OperatorCredentials, Server, ask
from weightgrad.errors import UnitError

app = typer.Typer(help="List, add, remove and revoke the sites of a running run.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The site.")]


@app.callback()
def group() -> None:
    """List, add, remove and revoke the sites of a running run."""


@app.command("list")
def list_sites(
    server: Server, credentials: OperatorCredentials = None, insecure: Insecure = False, as_json: AsJson = False
) -> None:
    """Show every site and how it stands."""
    _show(ask(server, credentials, insecure, "sites"), as_json)


@app.command("add")
def add(
    name: Name,
    server: Server,
    bandwidth: Annotated[str | None, typer.Option(help="Of its link, e.g. 100 Mbit/s; the site compares.")] = None,
    credentials: OperatorCredentials = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Let a site take part that the recipe does not name; rounds wait for it once it has joined."""
    bit_s = None if bandwidth is None else units.bit_s(bandwidth)
    if bit_s == 0:
        raise UnitError(f"--bandwidth {bandwidth}: wanted more than 0, e.g. '20 Mbit/s', or no --bandwidth")
    if bandwidth is not None and bandwidth.strip()[-1:].isdigit():
        raise UnitError(f"--bandwidth {bandwidth} has no unit; write e.g. --bandwidth '{bandwidth.strip()} Mbit/s'")
    said = f"{name} may join, with a certificate: weightgrad certs add-site DIR {name}"
    _show(ask(server, credentials, insecure, "add", site=name, bit_s=bit_s), as_json, said)


def _change(action: str, about: str, said: str) -> None:
    """Add a command that does one thing to one site."""

    @app.command(action, help=about)
    def command(
        name: Name,
        server: Server,
        credentials: OperatorCredentials = None,
        insecure: Insecure = False,
        as_json: AsJson = False,
    ) -> None:
        _show(ask(server, credentials, insecure, action, site=name), as_json, said.format(name))


_change(
    "remove",
    "End a site's session and let it in no more; what it has pushed stays in the global model.",
    "{} takes no part any more.",
)
_change("set-aside", "Let rounds not wait for a slow site; what it pushes counts.", "Rounds do not wait for {}.")
_change(
    "take-back",
    "Let rounds wait again for a site that was set aside, by an operator or by the server.",
    "Rounds wait for {} again.",
)


@app.command("revoke")
def revoke(
    name: Name,
    server: Server,
    serial: Annotated[
        str | None, typer.Option(help="Of the certificate, in hex; without it, that with which the site came last.")
    ] = None,
    credentials: OperatorCredentials = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Refuse a site's certificate from now on, and end its session."""
    found = ask(server, credentials, insecure, "revoke", site=name, serial=serial)
    _show(found, as_json, f"Revoked serial {', '.join(found['serials'])} of {name}.")


def _show(found: dict[str, Any], as_json: bool, done: str = "") -> None:
    if as_json:
        print(json.dumps(found, indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
    if done:
        console.print(done, markup=False)
        if not found["durable"]:
            console.print("The server has no --state: it will have forgotten this when it is started again.")
    table = Table(box=None, pad_edge=False)
    for title in ("site", "how it stands", "ranks here", "last round", "awaited now", "certificate"):
        table.add_column(title, style="bold" if title == "site" else None, no_wrap=True)
    for row in found["sites"]:
        table.add_row(
            f"{row['site']} (added)" if row["added"] else row["site"],
            "paused" if found["paused"] and row["state"] == "training" else row["state"],
            str(row["ranks"]) if row["connected"] else "none",
            str(row["round"]),
            "yes" if row["waited_for"] else "",
            "" if row["certificate"] is None else f"{row['certificate'][:8]}…",
        )
    console.print(table)
    console.print(_state(found), markup=False)


def _state(found: dict[str, Any]) -> str:
    if found["version"] is None:
        return "No site has brought a model yet."
    paused = "; the run is paused" if found["paused"] else ""
    return f"Global model version {found['version']}, step {found['step']}{paused}."

"""`weightgrad certs`: the certificates by which the sites and the global server identify each other."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from weightgrad.errors import CredentialsError
from weightgrad.runtime.security import certificates, credentials

app = typer.Typer(help="Make, renew, revoke and show certificates for mutual TLS.", no_args_is_help=True)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of the CA.", file_okay=False)]
Names = Annotated[str, typer.Option("--global-server", help="Comma-separated DNS names or IP addresses of the server.")]
Site = Annotated[str, typer.Argument(metavar="NAME", help="The site.")]
Days = Annotated[int, typer.Option(help="How long a certificate is valid.")]
EXPIRES_SOON = timedelta(days=30)


@app.callback()
def group() -> None:
    """Make, renew, revoke and show certificates for mutual TLS."""


@app.command("init")
def init(
    directory: Directory,
    global_server: Names,
    sites: Annotated[str, typer.Option(help="Comma-separated names of the sites.")],
    days: Days = 825,
) -> None:
    """Make a CA, a certificate for the global server and one for every site."""
    names = _listed(sites)
    certificates.create(directory, _listed(global_server), names, days=days)
    _print(f"Made a CA, a certificate for the global server and {len(names)} for sites in {directory}.")
    _print(f"  copy {directory / 'server'} to the global server")
    for name in names:
        _print(f"  copy {directory / 'sites' / name} to {name}")
    _print(f"  keep {directory / 'ca-key.pem'} offline: whoever has it can admit anyone")


@app.command("add-site")
def add_site(
    directory: Directory,
    name: Site,
    renew: Annotated[bool, typer.Option("--renew", help="Replace the key and certificate of a site.")] = False,
    days: Days = 825,
) -> None:
    """Make a certificate for a new site, or a new one for an existing site."""
    place, listed = directory / "sites" / name, directory / "server" / "revoked.txt"
    old = (place / "cert.pem").read_bytes() if renew and name in certificates.sites(directory) else None
    still_valid = old is not None and not credentials.Revoked(listed).has(credentials.serial_of(old))
    certificates.add_site(directory, name, renew=renew, days=days)
    _print(f"Made a certificate for {name}.\n  copy {place} to {name}")
    if old is not None and still_valid:
        serial, expires = credentials.serial_of(old), credentials.expires_of(old)
        _print(f"The old one, serial {serial:x}, stays valid until {expires:%Y-%m-%d}.")
        _print(f"  to end it sooner, add its serial as a line to {listed} and copy that to the global server")


@app.command("add-operator")
def add_operator(
    directory: Directory,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The operator: a person, or a machine that watches.")],
    renew: Annotated[bool, typer.Option("--renew", help="Replace the key and certificate of an operator.")] = False,
    days: Days = 825,
) -> None:
    """Make a certificate for somebody who may change a running run (`weightgrad sites`, `weightgrad run`)."""
    certificates.add_operator(directory, name, renew=renew, days=days)
    _print(f"Made a certificate for the operator {name}.\n  copy {directory / 'operators' / name} to {name}'s machine")


@app.command("renew-server")
def renew_server(directory: Directory, global_server: Names, days: Days = 825) -> None:
    """Make a new key and certificate for the global server."""
    certificates.renew_server(directory, _listed(global_server), days=days)
    _print(f"Made a certificate for the global server.\n  copy {directory / 'server'} to it and start it again")


@app.command("revoke")
def revoke(
    directory: Directory,
    name: Site,
    operator: Annotated[bool, typer.Option("--operator", help="NAME is an operator.")] = False,
) -> None:
    """Refuse the current certificate of a site, or of an operator, from now on."""
    serial = certificates.revoke(directory, name, operator=operator)
    _print(f"Revoked serial {serial:x} of {name}.")
    _print(f"  copy {directory / 'server' / 'revoked.txt'} to the global server, which reads it again by itself")
    add = "add-operator" if operator else "add-site"
    _print(f"  to admit {name} again: weightgrad certs {add} {directory} {name} --renew")


@app.command("show")
def show(directory: Directory) -> None:
    """List who has a certificate, until when, and whether it is revoked."""
    paths = {"CA": directory / "ca.pem", "global server": directory / "server" / "cert.pem"}
    paths |= {name: directory / "sites" / name / "cert.pem" for name in certificates.sites(directory)}
    paths |= {
        f"operator {name}": directory / "operators" / name / "cert.pem" for name in certificates.operators(directory)
    }
    if not paths["CA"].exists():
        raise CredentialsError(f"no {paths['CA']}; wanted the directory of a CA; make one with `weightgrad certs init`")
    revoked = credentials.Revoked(directory / "server" / "revoked.txt")
    table = Table(box=None, pad_edge=False)
    table.add_column("who", style="bold", overflow="fold")
    for title in ("serial", "expires", "revoked"):
        table.add_column(title, no_wrap=True)
    ending = []
    for who, path in paths.items():
        if path.exists():
            pem = path.read_bytes()
            serial, expires = credentials.serial_of(pem), credentials.expires_of(pem)
            table.add_row(who, f"{serial:x}", f"{expires:%Y-%m-%d}", "yes" if revoked.has(serial) else "no")
            left = expires - datetime.now(timezone.utc)
            if left < EXPIRES_SOON:
                ending.append(f"{who} {'has expired' if left < timedelta(0) else f'expires in {left.days} days'}")
    Console(highlight=False).print(table)
    for line in ending:
        _print(line)


def _listed(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _print(line: str) -> None:
    Console(highlight=False).print(line, markup=False, soft_wrap=True)

"""`weightgrad run`: pause a run that is going on, and let it go on."""

from __future__ import annotations

import json
from typing import Any

import typer

from weightgrad.cli.operator_options import AsJson, Insecure, OperatorCredentials, Server, ask

app = typer.Typer(help="Pause a running run, and let it go on.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Pause a running run, and let it go on."""


@app.command("pause")
def pause(
    server: Server, credentials: OperatorCredentials = None, insecure: Insecure = False, as_json: AsJson = False
) -> None:
    """Let all sites wait, after the step at which each next looks at its messages; nothing is lost."""
    _show(ask(server, credentials, insecure, "pause"), as_json)


@app.command("resume")
def resume(
    server: Server, credentials: OperatorCredentials = None, insecure: Insecure = False, as_json: AsJson = False
) -> None:
    """Let all sites go on where they were."""
    _show(ask(server, credentials, insecure, "resume"), as_json)


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=1))
        return
    what = "is paused" if found["paused"] else "goes on"
    print(f"The run {what} at global model version {found['version']}, step {found['step']}.")

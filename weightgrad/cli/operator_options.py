"""The options of the commands that ask a running global server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from weightgrad.errors import StrategyError
from weightgrad.runtime.doctor.server_questions import ServerQuestions
from weightgrad.runtime.security.credentials import Credentials

Server = Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="The global server.")]
OperatorCredentials = Annotated[
    Path | None,
    typer.Option(
        "--credentials", help="The operator's certificates (`weightgrad certs add-operator`).", file_okay=False
    ),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Without certificates; for a server on this machine.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def ask(server: str, credentials: Path | None, insecure: bool, what: str, **more: Any) -> dict[str, Any]:
    """Ask a global server as its operator."""
    if credentials is None and not insecure:
        raise StrategyError(
            "this needs --credentials DIR (make them with `weightgrad certs add-operator`), or --insecure for a server "
            "on this machine"
        )
    own = None if credentials is None else Credentials.load_operator(credentials)
    with ServerQuestions(server, own, streams=1) as questions:
        return questions.ask(what, **more)

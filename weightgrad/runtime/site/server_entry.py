"""How a rank asks a server process to be admitted, until it answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from weightgrad.errors import LinkError, RefusedError
from weightgrad.runtime.admission_messages import RankRequest
from weightgrad.runtime.security.tls_check import TlsProblem
from weightgrad.runtime.transport.transport import ClientTransport

log = logging.getLogger("weightgrad")

_RETRY_S = 0.5

Diagnose = Callable[[], TlsProblem | None]
"""Finds out why the server cannot be reached; None if no reason was found."""


def rank_request(site: str, rank: int) -> bytes:
    """What a rank says to a server process to be admitted."""
    return RankRequest(site=site, rank=rank).pack()


def enter(client: ClientTransport, request: bytes, *, timeout: float, diagnose: Diagnose | None = None) -> bytes:
    """Ask a server process to be admitted, again and again until it answers.

    Args:
        client: the connection.
        request: what is said.
        timeout: seconds to wait for a server that is not there yet.
        diagnose: finds out why it cannot be reached.

    Returns:
        The reply.

    Raises:
        RefusedError: the server refused, or the certificates do not fit.
        LinkError: the server could not be reached in time.
    """
    until, warned = time.monotonic() + timeout, False
    while True:
        try:
            return client.enter(request, timeout=max(1.0, min(10.0, timeout)))
        except LinkError as error:
            problem = diagnose() if diagnose is not None else None
            if problem is not None and problem.is_final and diagnose is not None:
                time.sleep(1.0)  # a server that is being stopped disconnects in the same way
                before, problem = problem, diagnose()
                if problem == before:
                    raise RefusedError(problem.reason) from error
            reason = "" if problem is None else problem.reason
            if time.monotonic() > until:
                raise LinkError(f"{error}" + (f" ({reason})" if reason else "")) from error
            if not warned:
                log.warning("%s; trying again", reason or error)
            warned = True
            time.sleep(_RETRY_S)

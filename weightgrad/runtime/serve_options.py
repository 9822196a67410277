"""How a global server runs, as opposed to what it trains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weightgrad.core.guard import Guard


@dataclass(frozen=True)
class ServeOptions:
    """How a server runs, as opposed to what it trains.

    Attributes:
        state: directory of the state; None keeps nothing.
        out: directory for the final global model; None writes none.
        until_finished: whether the server ends when every site has finished.
        guard: refuses updates that are too large; None refuses only what is not finite.
        result_bytes: how many bytes of results are kept for sites that were away; None: as many as half a model has,
            and 16 MB at least. A site that has missed more gets the whole global model.
        advertise: the addresses at which sites reach the processes, HOST:PORT each; None: this server's host, and the
            port of each process.
    """

    state: Path | None = None
    out: Path | None = None
    until_finished: bool = False
    guard: Guard | None = None
    result_bytes: int | None = None
    advertise: tuple[str, ...] | None = None

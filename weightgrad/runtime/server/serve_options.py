"""How a global server runs, as opposed to what it trains."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from weightgrad.core.server.guard import Guard


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
        max_parameters: the largest model that the first site may bring; None: one for which this machine has memory.
        first_site: the site that sends the first global model; None: the first that enters with the agreed model.
        max_ranks: how many ranks a site may have.
        agree_s: seconds to wait until a majority of three sites or more has entered with the same model.
        first_model_s: seconds without a part of it after which another site may send the first global model.
        waiting_s: seconds after which log and sites are told for whom a round waits, if it takes longer than it should.
        return_s: with `until_finished`, seconds to wait for the return of a site that is lost and had not finished.
        advertise: the addresses at which sites reach the processes, HOST:PORT each; None: this server's host, and the
            port of each process.
    """

    state: Path | None = None
    out: Path | None = None
    until_finished: bool = False
    guard: Guard | None = None
    result_bytes: int | None = None
    advertise: tuple[str, ...] | None = None
    max_parameters: int | None = None
    first_site: str | None = None
    max_ranks: int = 256
    agree_s: float = 20.0
    first_model_s: float = 60.0
    waiting_s: float = 5.0
    return_s: float = 120.0

    def largest_model(self) -> int:
        """How many parameters the first model may have: what was set, or 16 bytes for each in half of the memory."""
        if self.max_parameters is not None:
            return self.max_parameters
        try:
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):
            memory = 16 << 30
        return max(1 << 20, memory // 32)

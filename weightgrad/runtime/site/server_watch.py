"""When a site that waits for the global server stops waiting: the server has ended, or is gone for good.

A server that is restarted, or a line that is cut, is waited for. If nothing listens at the server's address for some
minutes (its machine answers, and refuses connections), it has ended; if it cannot be reached at all, that may be the
line, which is given more time.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from weightgrad.errors import LinkError
from weightgrad.runtime.security.tls_check import split

NOBODY_S = 300.0
"""Seconds without anybody at the server's address after which it has ended."""
_ASK_S = 5.0  # between two looks at the address
_CONNECT_S = 2.0


class ServerWatch:
    """Counts how long the global server has been away, on rank 0 of a site.

    Args:
        address: HOST:PORT of the server.
        away_s: seconds after which the site gives up, whatever the reason.
        kept: says in words what the site has on its disk.
        clock: seconds; for tests.
    """

    def __init__(
        self,
        address: str,
        away_s: float,
        kept: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address, self._away_s, self._clock = address, away_s, clock
        self.kept = kept
        self._lost_at: float | None = None
        self._nobody_since: float | None = None
        self._asked = -_ASK_S

    def lost(self) -> None:
        """The connection is lost."""
        if self._lost_at is None:
            self._lost_at, self._nobody_since = self._clock(), None

    def found(self) -> None:
        """The connection is there again."""
        self._lost_at = None

    def look(self) -> None:
        """Training waits: give up if the server has been away for too long.

        Raises:
            LinkError: it has.
        """
        if self._lost_at is None:
            return
        every = min(_ASK_S, self._away_s / 4)
        if self._clock() - self._asked >= every:
            self._asked = self._clock()
            self._nobody_since = (self._nobody_since or self._asked) if self._nobody_listens() else None
        away = self._clock() - self._lost_at
        if self._nobody_since is not None and self._clock() - self._nobody_since >= min(NOBODY_S, self._away_s):
            raise LinkError(
                f"the global server has ended: nothing has listened at {self._address} for "
                f"{self._clock() - self._nobody_since:.0f} s. {self.kept()}"
            )
        if away >= self._away_s:
            raise LinkError(f"the global server at {self._address} has been away for {away:.0f} s. {self.kept()}")

    def gives_up(self, error: LinkError) -> LinkError:
        """What is raised when a server that was restarted does not let the site in."""
        return LinkError(f"{error}. {self.kept()}")

    @property
    def away_s(self) -> float:
        """Seconds after which the site gives up."""
        return self._away_s

    def _nobody_listens(self) -> bool:
        """Whether the server's machine answers that nothing listens there."""
        if (place := split(self._address)) is None:
            return False
        try:
            socket.create_connection(place, _CONNECT_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False

"""Keeps strangers from using up the connections of a global server.

gRPC accepts every TCP connection and gives it time for its TLS handshake, so somebody without a certificate could take
all file descriptors of the process. The gate looks at the open connections of the server's port a few times a second.
A connection is proven once a call on it came from a site of the run. Of the others only so many stay, from one address
and in all, and none for longer than a handshake takes: the gate shuts their sockets down, and gRPC closes them.
Connections that a session of a site uses are never touched. Of those that are proven and that no session uses, a site
has only so many, and none for long: otherwise one site could take all connections that the server may have.

gRPC does not expose its sockets, so they are found among the open files of the process, as `socket_bytes.py` does.
Where that is not possible (not Linux), only gRPC's own limits hold.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from weightgrad.errors import SpecError
from weightgrad.runtime.transport.socket_bytes import endpoint, host_of

log = logging.getLogger("weightgrad.serve")

_FILES = "/proc/self/fd"
_LOOK_S = 0.2
_SAY_S = 10.0  # between two lines in the log


@dataclass(frozen=True, kw_only=True)
class GateLimits:
    """How many connections of strangers stay open.

    Attributes:
        per_address: unproven connections from one address.
        in_all: unproven connections from all addresses together.
        handshake_s: seconds until a connection must have been used by a site of the run.
        idle_per_site: connections of a site that none of its sessions uses.
        idle_s: seconds for which there may be such a one.
    """

    per_address: int = 64
    in_all: int = 256
    handshake_s: float = 10.0
    idle_per_site: int = 256
    idle_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("per_address", "in_all", "handshake_s", "idle_per_site", "idle_s"):
            if not getattr(self, name) > 0:
                raise SpecError(f"GateLimits.{name} is {getattr(self, name)!r}; it must be positive")


class ConnectionGate:
    """Watches the connections to a port of this process. `start` begins, `stop` ends.

    Args:
        port: the port.
        limits: how many connections of strangers stay open.
        on_refused: called with a fixed phrase for each connection that is shut down.
        in_use: the endpoints that sessions use now.
    """

    def __init__(
        self,
        port: int,
        limits: GateLimits,
        on_refused: Callable[[str], None],
        in_use: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._port, self._limits, self._on_refused, self._in_use = port, limits, on_refused, in_use
        self._proven: dict[str, str] = {}  # the site at each endpoint
        self._since: dict[str, float] = {}  # when an endpoint was first seen
        self._ended: set[str] = set()
        self._said = 0.0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="connection-gate", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End. May be called again."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def prove(self, peer: str, site: str) -> None:
        """A call from the endpoint "HOST:PORT" came from this site of the run."""
        with self._lock:
            self._proven[peer] = site
            self._since[peer] = time.monotonic()

    def doubt(self, peer: str) -> None:
        """A session at the endpoint was ended: it has the time of a handshake to prove itself anew."""
        with self._lock:
            self._proven.pop(peer, None)
            self._since[peer] = time.monotonic()

    def _watch(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            try:
                self.look(time.monotonic())
            except Exception:
                log.exception("looking at the connections failed")

    def look(self, now: float) -> int:
        """Look once, and shut down what is too much or too late.

        Args:
            now: seconds of any clock that does not jump.

        Returns:
            How many connections were shut down.
        """
        files, used = connections(self._port), frozenset(self._in_use())
        with self._lock:
            self._proven = {peer: site for peer, site in self._proven.items() if peer in files}
            self._ended &= files.keys()
            self._since = {peer: now if peer in used else self._since.get(peer, now) for peer in files}
            strangers = [peer for peer in files if peer not in self._proven and peer not in self._ended]
            strangers.sort(key=lambda peer: self._since[peer])
            late = [peer for peer in strangers if now - self._since[peer] >= self._limits.handshake_s]
            chosen = set(late) | self._too_many([peer for peer in strangers if peer not in late])
            chosen |= self._idle([peer for peer in self._proven if peer not in used | self._ended], now)
            for peer in chosen:
                self._ended.add(peer)
                _shut_down(files[peer])
        for _ in chosen:
            self._on_refused("no handshake in time, or too many connections")
        if chosen and now - self._said >= _SAY_S:
            self._said = now
            worst, count = Counter(host_of(peer) for peer in chosen).most_common(1)[0]
            log.warning(
                "%d connections were ended that no site used, %d of them from %s; restrict the port to the addresses "
                "of the sites",
                len(chosen),
                count,
                worst,
            )
        return len(chosen)

    def _too_many(self, strangers: list[str]) -> set[str]:
        """The newest ones of the addresses that have most."""
        chosen: set[str] = set()
        by_address: dict[str, list[str]] = {}
        for peer in strangers:
            by_address.setdefault(host_of(peer), []).append(peer)
        for found in by_address.values():
            chosen |= {found.pop() for _ in range(len(found) - self._limits.per_address)}
        left = sum(map(len, by_address.values()))
        while left > self._limits.in_all:
            chosen.add(max(by_address.values(), key=len).pop())
            left -= 1
        return chosen

    def _idle(self, peers: list[str], now: float) -> set[str]:
        """Of proven connections that no session uses, the old ones and the newest ones of sites that have too many."""
        chosen = {peer for peer in peers if now - self._since[peer] >= self._limits.idle_s}
        by_site: dict[str, list[str]] = {}
        for peer in sorted(peers, key=lambda peer: self._since[peer]):
            by_site.setdefault(self._proven[peer], []).append(peer)
        for found in by_site.values():
            chosen |= set(found[self._limits.idle_per_site :])
        return chosen


def connections(port: int) -> dict[str, int]:
    """The files of this process that are connections to a port of it, by the endpoint of the other end."""
    found: dict[str, int] = {}
    if not os.path.isdir(_FILES):
        return found
    for name in os.listdir(_FILES):
        try:
            if not os.readlink(f"{_FILES}/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == port:
                    theirs = one.getpeername()
                    found[endpoint(theirs[0], theirs[1])] = int(name)
        except OSError:
            continue  # it was closed meanwhile, or listens
    return found


def _shut_down(file: int) -> None:
    try:
        with socket.socket(fileno=os.dup(file)) as one:
            one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is gone already


def raise_file_limit() -> int:
    """Let this process have as many open files as the system allows; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            log.warning("this process may have %d open files, and no more: %s", soft, error)
            return soft
    return hard

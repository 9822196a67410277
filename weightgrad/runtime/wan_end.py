"""The local server's line to the global server: a SiteEnd, fed with what comes, and its messages sent.

Bytes move in the transport's threads while the site computes; the state machine is only touched by
the thread that trains, between two steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from weightgrad.errors import LinkError, RefusedError
from weightgrad.ledger import Ledger
from weightgrad.runtime import tls_check
from weightgrad.runtime.admission import Admission, Ask, read_admission
from weightgrad.runtime.lanes_client import LanesClient
from weightgrad.runtime.link_watch import LinkWatch
from weightgrad.runtime.socket_bytes import SocketBytes
from weightgrad.wan.message_bytes import pack, unpack
from weightgrad.wan.messages import Message, Plant, Push
from weightgrad.wan.site_end import SiteEnd

log = logging.getLogger("weightgrad")

_PATIENCE = 0.2  # seconds between looks at the line while waiting


class WanEnd:
    """Rank 0's. `why_not` looks for the reason when the server cannot be reached."""

    def __init__(self, client: LanesClient, ask: Ask, ledger: Ledger | None, why_not: Callable[[], str | None]) -> None:
        self._client, self._ask, self._ledger, self._why_not = client, ask, ledger, why_not
        self._end: SiteEnd | None = None
        self.waited = 0.0
        self.up_bytes = self.down_bytes = 0
        self._began = time.monotonic()
        self._sockets = SocketBytes(int(client.address.rsplit(":", 1)[1]), side="client")
        self._sampled = 0.0
        self.watch = LinkWatch(ask.site, None)
        if self._sockets.why_not is not None:
            log.info("%s: bytes on the socket are not counted: %s", ask.site, self._sockets.why_not)

    @property
    def now(self) -> float:
        """Seconds since this site came."""
        return time.monotonic() - self._began

    def enter(self, *, patience: float = 60.0) -> Admission:
        """Ask to be let in; waits so long for a server that is not there yet."""
        until, said = time.monotonic() + patience, False
        while True:
            try:
                return read_admission(self._client.enter(self._ask.pack(), timeout=max(1.0, min(10.0, patience))))
            except LinkError as error:
                why = self._why_not()
                if why is not None and tls_check.refuses(why):
                    time.sleep(1.0)  # a server that is just being stopped hangs up in the same way
                    before, why = why, self._why_not()
                    if why == before:
                        raise RefusedError(why) from error
                if time.monotonic() > until:
                    raise LinkError(f"{error}" + (f" ({why})" if why else "")) from error
                if not said:
                    log.warning("%s: %s; trying again", self._ask.site, why or error)
                said = True
                time.sleep(0.5)

    def attach(self, end: SiteEnd) -> None:
        """From now on messages are this machine's."""
        self._end = end

    def start(self) -> None:
        """Open the lanes."""
        self._client.start()

    def send(self, messages: list[Message]) -> None:
        """Put them on their way."""
        for message in messages:
            data = pack(message)
            self.up_bytes += len(data)
            self._client.send(data)
            if isinstance(message, Push) and self._ledger is not None:
                self._ledger.write("push", self.now, round=message.round, step=message.step, bytes=len(data))

    def plant(self, message: Plant) -> None:
        """The first base."""
        self.send([message])

    def pump(self, timeout: float = 0.0) -> bool:
        """Take what has come; whether anything had."""
        end = self._end
        assert end is not None
        if self.now - self._sampled > 2.0 or end.stopwatch.trip == 0:
            self._sampled = self.now
            if (total := self._sockets.total()) is not None:
                self.watch.sample(self.now, total.sent, self._client.unacknowledged_bytes > 0)
            end.stopwatch.trip = self._sockets.trip
        self._look_at_line(end)
        data = self._client.receive(timeout)
        found = data is not None
        while data is not None:
            self.down_bytes += len(data)
            self.send(end.receive(unpack(data), self.now))
            data = self._client.receive(0.0)
        return found

    def _look_at_line(self, end: SiteEnd) -> None:
        for event in self._client.events():
            if event != "gone":
                log.info("%s: the line to the global server is %s", self._ask.site, event)
                continue
            log.warning(
                "%s: the global server has forgotten this session (it was restarted?); entering again", end.name
            )
            self._ask = replace(self._ask, version=end.base.version, digest=end.base.digest())
            admission = self.enter(patience=24 * 3600.0)
            self._client.start()
            if admission.plant:  # it went before the first base was on its disk
                self.plant(Plant(end.name, {"base": end.base.vector}))
            self.send(end.join(same_start=admission.same_start or end.base.version > 0))

    def until_free(self) -> bool:
        """Apply what has come and wait for what must; whether the model has moved."""
        end = self._end
        assert end is not None
        rebases = end.rebases
        self.pump()
        moved = bool(end.settle())
        began, why = time.monotonic(), end.blocked(self.now)
        first = why
        while why is not None:
            self.pump(_PATIENCE)
            moved = bool(end.settle()) or moved
            why = None if end.finished else end.blocked(self.now)
        if first is not None:
            seconds = time.monotonic() - began
            self.waited += seconds
            if self._ledger is not None:
                self._ledger.write("wait", self.now, step=end.step, seconds=round(seconds, 6), why=first)
        if end.rebases == rebases:
            return moved
        kind = "exact" if end.exact else "approximate; the exact one is on its way"
        log.info("%s: the whole base of version %d has come, %s", end.name, end.base.version, kind)
        return True

    def socket_bytes(self) -> dict[str, int] | None:
        """Bytes that crossed the sockets to the server, TLS and gRPC included; None where they cannot be counted."""
        self._sockets.sample()
        found = self._sockets.total()
        return None if found is None else {"sent": found.sent, "received": found.received}

    def close(self) -> None:
        """Everything said has been heard; hang up."""
        self._client.wait_sent(10.0)
        self._client.close(2.0)

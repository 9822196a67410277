"""A rank's connections to the global server: one to each server process that serves elements which the rank holds.

Bytes move in the transport's threads while the rank computes. Only the training thread touches the state of the site,
at the steps where something is decided.

Rank 0 also speaks with the coordinator of the server (server process 0), on the control lane. Parts of round results
are collected until they are complete, and parts of a download until the rank is told to load them
(`runtime/site/server_link.py`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from weightgrad.core.site.shard import SiteShard
from weightgrad.core.site.shard_orders import LoadOrder
from weightgrad.errors import LinkError, ProtocolError
from weightgrad.runtime.admission_messages import rank_sends_model
from weightgrad.runtime.site.link_monitor import LinkMonitor
from weightgrad.runtime.site.server_link import ServerLink
from weightgrad.runtime.site.server_watch import ServerWatch
from weightgrad.runtime.telemetry import SiteTelemetry
from weightgrad.runtime.transport.transport import LinkEvent
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_bytes import to_buffers, unpack
from weightgrad.wire.message_parts import ResultAssembly, cut_push, of_holder
from weightgrad.wire.message_sizes import nbytes
from weightgrad.wire.messages import (
    Bulk,
    Control,
    Holding,
    JoinReply,
    ModelPart,
    Push,
    ResultPart,
    RoundResult,
    Segment,
    Waiting,
)

log = logging.getLogger("weightgrad")

_ENTER_S = 1.0  # to wait for a process that was restarted, at a time
_HANG_UP_S = 2.0  # for a last word to arrive
_SAMPLE_S = 2.0  # between two looks at the sockets

FirstParts = Callable[[Intervals], Sequence[ModelPart]]
"""Makes the parts of this rank's weights that a server process serves."""


@dataclass
class RankConnection:
    """All connections of one rank.

    Attributes:
        site: the name of the site.
        rank: this rank.
        speakers: for each server process, how many ranks of the site hold elements that it serves.
        epoch: of the site's processes.
        held: what this rank holds.
        links: the connections, by server process. Rank 0 always has one to process 0.
        telemetry: what is reported.
        rejoin: called when the coordinator of the server does not know rank 0 any more: enters again.
    """

    site: str
    rank: int
    speakers: Sequence[int]
    epoch: int
    held: Intervals
    links: dict[int, ServerLink]
    telemetry: SiteTelemetry
    rejoin: Callable[[], None] | None = None
    up_bytes: int = 0
    down_bytes: int = 0
    watch: LinkMonitor | None = None
    server_watch: ServerWatch | None = None  # on rank 0
    _shard: SiteShard | None = None
    _first_parts: FirstParts | None = None
    _control: deque[Control] = field(default_factory=deque)
    _loading: bool = False
    _interrupted: bool = False  # a server process was restarted while a download was loaded
    _sampled: float = 0.0
    _contributors: set[str] = field(default_factory=set)  # the sites whose pushes were in results

    def __post_init__(self) -> None:
        sources = frozenset(number for number, link in self.links.items() if link.served)
        self.results = ResultAssembly(sources)
        self.trip_s = 0.0

    @property
    def now(self) -> float:
        """Seconds since this rank came."""
        return self.telemetry.now

    # -- the beginning -------------------------------------------------------------------------

    def begin(self, shard: SiteShard, first_parts: FirstParts) -> None:
        """Say what this rank holds, on every connection, and send the pushes that a checkpoint has left in flight.

        The server may have none of their parts: they are in the checkpoint before they are on the line.

        Args:
            shard: has the pushes that may have to be sent again.
            first_parts: makes the parts of the first global model that one server process serves.
        """
        self._shard, self._first_parts = shard, first_parts
        for number, link in self.links.items():
            self._say_again(number, link)

    def _introduce(self, number: int) -> None:
        if self.links[number].served:
            ranks = self.speakers[number]
            message = Holding(site=self.site, rank=self.rank, ranks=ranks, epoch=self.epoch, held=self.held)
            self.send_bulk(number, message)

    def send_model(self, number: int | None = None) -> None:
        """Send the weights of this rank, which become the first global model, to one server process or to all."""
        for one, link in self.links.items():
            if link.served and number in (None, one) and self._first_parts is not None:
                for part in self._first_parts(link.served):
                    self.send_bulk(one, part)

    # -- messages out --------------------------------------------------------------------------

    def send_control(self, message: Control) -> None:
        """Queue a message for the coordinator of the server."""
        self.links[0].client.send(to_buffers(message), control=True)
        self._count(nbytes(message), message if isinstance(message, Push) else None)

    def send_push(self, round_: int, segments: Iterable[Segment]) -> int:
        """Queue what this rank contributes to a push, each part as soon as its segments are made.

        Args:
            round_: the round of the push.
            segments: the segments, those of one server process after the other.

        Returns:
            The bytes of the parts.
        """
        size, without = 0, [number for number, link in self.links.items() if link.served]
        for number, own in groupby(segments, self._server_of):
            without.remove(number)
            size += self._send_parts(number, round_, own)
        return size + sum(self._send_parts(number, round_, ()) for number in without)

    def _server_of(self, segment: Segment) -> int:
        first = _first_element(segment)
        return next(number for number, link in self.links.items() if link.served.contains(first))

    def _send_again(self, number: int, round_: int, segments: Sequence[Segment]) -> None:
        # After a restart with other ranks a push in flight may lie on several; the holder of its start sends it.
        own = of_holder(segments, self.links[number].served)
        self._send_parts(number, round_, (one for one in own if self.held.contains(_first_element(one))))

    def _send_parts(self, number: int, round_: int, segments: Iterable[Segment]) -> int:
        size = 0
        for part in cut_push(self.site, round_, self.rank, segments):
            self.send_bulk(number, part)
            size += nbytes(part)
        return size

    def send_bulk(self, number: int, message: Bulk) -> None:
        """Queue a bulk message for a server process."""
        self.links[number].client.send(to_buffers(message))
        self._count(nbytes(message), None)

    def _count(self, size: int, push: Push | None) -> None:
        self.up_bytes += size
        self.telemetry.sent(size, push)

    # -- messages in ---------------------------------------------------------------------------

    def poll(self, timeout: float = 0.0) -> bool:
        """Take in what has come.

        Args:
            timeout: seconds to wait for the first message; 0 if training does not wait.

        Returns:
            Whether a message had come.

        Raises:
            RefusedError: the server has ended a session.
            LinkError: training waits, and the server has been away for too long.
        """
        self._sample()
        if timeout and self.server_watch is not None:
            self.server_watch.look()
        found = False
        for number, link in self.links.items():
            self._handle_events(number, link)
            if link.gone:
                self._enter_again(number, link)
            data = link.client.receive(0.0 if found else timeout / len(self.links))
            while data is not None:
                found = True
                self.down_bytes += len(data)
                self.telemetry.received(len(data))
                self._take(number, link, data)
                data = None if self._control else link.client.receive(0.0)  # control messages come first
        return found

    def _take(self, number: int, link: ServerLink, data: memoryview) -> None:
        message = unpack(data)
        if isinstance(message, ModelPart):
            link.download.add_part(message)
        elif isinstance(message, ResultPart):
            link.download.add_result(message)
            self.results.add(number, message)
        elif isinstance(message, Holding):
            raise ProtocolError("the server sent a Holding, which only ranks send")
        elif isinstance(message, Waiting):
            self.telemetry.others_wait(message)
        else:
            self.telemetry.waiting = None
            if isinstance(message, RoundResult):
                self.telemetry.without = sorted(self._contributors.difference(message.included))
                self._contributors.update(message.included)
            self._control.append(message)  # type: ignore[arg-type]

    def control(self) -> Control | None:
        """The next message from the coordinator of the server, in order."""
        return self._control.popleft() if self._control else None

    def _handle_events(self, number: int, link: ServerLink) -> None:
        for event in link.client.events():
            if number == 0 and self.rank == 0:
                self.telemetry.link_event(event, link.client.why)
                if self.server_watch is not None:
                    self.server_watch.lost() if event is LinkEvent.LOST else self.server_watch.found()
            if event is LinkEvent.GONE:
                self._come_again(number, link)

    def _come_again(self, number: int, link: ServerLink) -> None:
        """A server process was restarted: what it had sent is void, and everything has to be said again."""
        link.download.forget()
        self._interrupted = self._interrupted or self._loading
        self.results.forget(number)
        if number == 0 and self.rank == 0 and self.rejoin is not None:
            self.rejoin()
            self._say_again(number, link)
        else:
            link.gone = True

    def _enter_again(self, number: int, link: ServerLink) -> None:
        """Try once to enter again. Whoever waited here might wait for rank 0, and rank 0 for this rank."""
        try:
            reply = link.client.enter(link.request, timeout=_ENTER_S)
        except LinkError:
            return
        link.gone = False
        link.client.start()
        if rank_sends_model(reply):
            self.send_model(number)
        self._say_again(number, link)

    def _say_again(self, number: int, link: ServerLink) -> None:
        self._introduce(number)
        for round_, segments in self._shard.in_flight.items() if self._shard is not None and link.served else ():
            self._send_again(number, round_, segments)

    def _sample(self) -> None:
        if not self.links or (self.now - self._sampled <= _SAMPLE_S and self.trip_s):
            return
        self._sampled = self.now
        client = next(iter(self.links.values())).client
        total = client.socket_bytes()
        self.trip_s = client.round_trip_s
        if self.watch is not None and total is not None:
            self.watch.sample(self.now, total.sent, client.unacknowledged_bytes)

    # -- results and downloads -----------------------------------------------------------------

    def has_result(self, version: int) -> bool:
        """Whether this rank has all values of a result that it needs."""
        return all(
            link.download.loaded >= version or self.results.complete_from(version, number)
            for number, link in self.links.items()
            if link.served
        )

    def take_result(self, result: RoundResult) -> RoundResult:
        """A result with the values for this rank, all of which are here."""
        ahead = {number for number, link in self.links.items() if link.download.loaded >= result.version}
        return self.results.take(result, without=ahead)

    def load(self, order: LoadOrder, shard: SiteShard, reply: JoinReply) -> bool:
        """Load a download, part by part as it comes.

        Returns:
            False if a server process was restarted meanwhile: the download must be asked for again.

        Raises:
            RefusedError: the server has ended a session.
        """
        self._loading, self._interrupted = True, False
        try:
            shard.begin_load(discards=order.discards)
            if not all(self._load_from(link, shard) for link in self.links.values() if link.served):
                return False
        finally:
            self._loading = False
        shard.end_load(order, reply.scalars)
        return True

    @property
    def loading(self) -> bool:
        """Whether a download is being loaded."""
        return self._loading

    def has_download(self) -> bool:
        """Whether a whole download has come to this rank."""
        return all(link.download.complete for link in self.links.values() if link.served)

    def _load_from(self, link: ServerLink, shard: SiteShard) -> bool:
        while True:
            while not link.download:
                self.poll(0.2)
                if self._interrupted:
                    return False
            if link.download.load_next(shard):
                return True

    # -- the end -------------------------------------------------------------------------------

    def socket_bytes(self) -> dict[str, int] | None:
        """Bytes that crossed the sockets to the server, TLS and gRPC included; None where they are not counted."""
        counts = [link.client.socket_bytes() for link in self.links.values()]
        known = [count for count in counts if count is not None]
        if not known:
            return None
        return {"sent": sum(one.sent for one in known), "received": sum(one.received for one in known)}

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes that this rank has queued and no server process has acknowledged."""
        return sum(link.client.unacknowledged_bytes for link in self.links.values())

    def wait_sent(self, size: int) -> None:
        """Wait until the server has what rank 0 has sent it, at most as long as so many bytes take at 1 Mbit/s."""
        self.links[0].client.wait_sent(10.0 + 8 * size / 1e6)

    def close(self) -> None:
        """Wait until the server has everything, and leave in order."""
        for link in self.links.values():
            link.client.wait_sent(10.0)
        for link in self.links.values():
            link.client.close(2.0)

    def hang_up(self) -> None:
        """Leave in order, but without waiting long for what is still on its way: training has failed."""
        for link in self.links.values():
            link.client.close(_HANG_UP_S)

    def abort(self) -> None:
        """Disconnect at once and without a goodbye, as a process that is killed does."""
        for link in self.links.values():
            link.client.abort()


def _first_element(segment: Segment) -> Intervals:
    return Intervals(((segment.start, segment.start + 1),))

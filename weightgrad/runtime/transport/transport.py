"""The transport between the sites and the global server: what the rest of the runtime may ask of it.

A transport carries whole messages, each once, in both directions between one global server and any number of peers.
A peer is one rank of a site. A transport knows nothing of what the messages mean. Two implementations keep this
contract:

    grpc_client.GrpcClient, grpc_server.GrpcServer    gRPC over several TCP connections, with mutual TLS
    in_memory.InMemoryClient, in_memory.InMemoryServer    queues between threads of one process

A session has two lanes each way. A lane keeps the order of its messages; there is no order between the lanes:

    bulk       messages of any length
    control    `send(..., control=True)`: short messages that never wait behind bulk ones. They have connections and
               memory of their own, and the receiver is given those that wait before bulk ones that wait. One of
               more than `MAX_CONTROL_MESSAGE` bytes is refused as any message is that is too long.

Lifetime of a session:

    client.enter(request)    the server's `Application.enter` admits the peer or refuses it. Admission starts a
                             session and ends an earlier session of the same peer, whose queues are dropped.
    client.start()           messages begin to flow.
    ... the connection may be lost and restored any number of times; the session and its messages survive ...
    client.close(grace)      the peer leaves in order: `Application.on_lost(peer, left=True)`.
    server.drop(peer, why)   the server ends the session; the client sees the event REFUSED.
    server.stop(grace)       the server goes away; the client sees LOST, and GONE once a new server answers.

A peer has one session at a time. If another process enters as the same rank of the same site, the earlier process
sees GONE, and its attempts to enter again are refused. The sessions of a site's ranks are independent of each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from weightgrad.errors import SpecError

if TYPE_CHECKING:
    from weightgrad.runtime.transport.grpc_questions import Responder

Data: TypeAlias = bytes | bytearray | memoryview

Outgoing: TypeAlias = Data | Sequence[Data]
"""A message to be sent: one buffer, or several that follow one another. None is copied before it is sent."""

MAX_RANKS = 1 << 16
MAX_CONTROL_MESSAGE = 1 << 20
"""The longest control message that a receiver takes unless it is told otherwise, in bytes."""


class Peer(NamedTuple):
    """One rank of a site. For logs it is written "virginia" if its rank is 0, else "virginia rank 3"."""

    site: str
    rank: int

    def __str__(self) -> str:
        return f"{self.site} rank {self.rank}" if self.rank else self.site


def check_rank(rank: int) -> None:
    """Raise SpecError unless `rank` is a rank that a transport can name."""
    if not 0 <= rank < MAX_RANKS:
        raise SpecError(f"rank is {rank}; it must be 0 to {MAX_RANKS - 1}")


def joined(data: Outgoing) -> bytes:
    """A message as one buffer."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    return b"".join(data)


class LinkEvent(str, Enum):
    """What happened to a client's connection."""

    CONNECTED = "connected"
    """Messages flow: connections of both lanes are open. While some of them break and reopen, no event follows."""
    LOST = "lost"
    """No connection of either lane is open any more; it may come without a CONNECTED before, if only one lane was open.
    The transport reconnects by itself, and the session's messages are kept."""
    GONE = "gone"
    """The server does not know the session any more. Its queues are void: call `enter` and `start` again."""
    REFUSED = "refused"
    """The server ended the session on purpose."""


@dataclass
class Traffic:
    """Bytes sent and received."""

    sent: int = 0
    received: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent + other.sent, self.received + other.received)


@dataclass(frozen=True)
class EntryRequest:
    """A peer that asks to enter: the name it claims, and what its certificate proves.

    Attributes:
        site: the name of the site that the peer claims.
        rank: the rank inside the site that the peer claims; a certificate proves only the site.
        incarnation: identifies the process; a restarted one has another.
        request: the bytes given to `ClientTransport.enter`; empty when only the peer is checked.
        peer_name: the common name in the peer's certificate; None without TLS.
        peer_serial: the serial number of that certificate; None without TLS.
        peer_address: where the peer connects from, for logs.
    """

    site: str
    rank: int
    incarnation: str
    request: bytes
    peer_name: str | None
    peer_serial: int | None
    peer_address: str

    @property
    def peer(self) -> Peer:
        """Who asks."""
        return Peer(self.site, self.rank)


@dataclass(frozen=True)
class SessionStatus:
    """A session at one moment: who, over how many open streams, and how much is still on its way to the peer."""

    incarnation: str
    streams: int
    unacknowledged_bytes: int


class Application(Protocol):
    """What a server transport calls, from threads of its own.

    For one peer, `enter`, `on_message` and `on_lost` never run at the same time; for different peers they may, also
    for two ranks of one site.
    """

    def check_peer(self, entry: EntryRequest) -> None:
        """Raise a WeightGradError unless this peer may connect.

        Called before `enter` and whenever a peer connects. A transport with certificates also calls it every few
        seconds for peers that are connected, so that a revoked certificate ends a session.
        """

    def enter(self, entry: EntryRequest) -> bytes:
        """Admit a peer and return the reply, or raise a WeightGradError whose text the peer is shown.

        RefusedError, CredentialsError and ProtocolError are refusals. A LinkError asks the peer to try again.
        """

    def on_message(self, peer: Peer, data: memoryview, control: bool) -> None:
        """Take a message, and hear whether it came on the control lane.

        The memory belongs to the application for as long as it keeps the view.

        A control message is given before bulk messages that wait. A WeightGradError ends the session, and the peer is
        shown its text. While this call blocks, further messages of the peer wait, those of both lanes.
        """

    def on_lost(self, peer: Peer, left: bool) -> None:
        """Note that a peer is not connected any more.

        Args:
            peer: the peer.
            left: True if the peer closed its session in order. False if it was refused, or if it has been
                without a connection for some seconds; in the latter case the session continues if the peer comes back.
        """

    def on_refused(self, reason: str) -> None:
        """Count a peer that the transport itself refused before `enter` was called. `reason` is a fixed phrase."""


class ClientTransport(ABC):
    """One rank's connection to the global server.

    Any thread may call any method. Nothing is sent before `enter` and `start`; after `close` or `abort` the
    object cannot be used again.
    """

    address: str
    """The address of the server, for messages to people."""
    why: str
    """The text that explains the last LOST, GONE or REFUSED; empty before the first."""
    traffic: Traffic
    """Bytes given to the network and taken from it, repeated ones included."""
    asked_at: float = 0.0
    """When `enter` last asked the server, by this machine's clock; 0 if that is not known."""

    @abstractmethod
    def enter(self, request: bytes, timeout: float) -> bytes:
        """Ask to be admitted. On success a new session begins, and whatever an old one had queued is dropped.

        Args:
            request: what `Application.enter` is given.
            timeout: seconds to wait for a server that does not answer.

        Returns:
            What `Application.enter` returned.

        Raises:
            RefusedError: the server refused; the error has the server's text.
            LinkError: nobody answered in time.
        """

    @abstractmethod
    def start(self) -> None:
        """Let the messages of the session that `enter` began flow.

        Raises:
            LinkError: there is no session.
        """

    @abstractmethod
    def send(self, data: Outgoing, *, control: bool = False) -> None:
        """Queue a message and return at once. Its memory must not be written to until it has been sent.

        In a session that is GONE the message is dropped, like everything that was queued there.

        Args:
            data: the message.
            control: whether it is a control message, which bulk messages do not delay.

        Raises:
            RefusedError: the server has ended the session on purpose.
            LinkError: there is no session.
        """

    @abstractmethod
    def receive(self, timeout: float = 0.0) -> memoryview | None:
        """Return the next message: the first control message that waits, or the first bulk message if there is none.

        Args:
            timeout: seconds to wait for one of either lane. An event ends the wait early.

        Returns:
            A message whose memory is the caller's for as long as the view is kept; None if none came.

        Raises:
            RefusedError: the server has ended the session on purpose; messages that were not taken are dropped.
            LinkError: there is no session.
        """

    @abstractmethod
    def events(self) -> list[LinkEvent]:
        """Return what has happened to the connection since the last call, oldest first."""

    @property
    @abstractmethod
    def unacknowledged_bytes(self) -> int:
        """Bytes of messages of both lanes that were queued and are not known to have arrived."""

    @abstractmethod
    def wait_sent(self, timeout: float) -> bool:
        """Wait until the server has everything of both lanes; False if that took longer, or if the session ended."""

    @abstractmethod
    def socket_bytes(self) -> Traffic | None:
        """Bytes that crossed the sockets to the server, TLS and gRPC included; None where they are not counted."""

    @property
    @abstractmethod
    def round_trip_s(self) -> float:
        """The shortest round trip seen lately, in seconds; 0 where it is not known."""

    @abstractmethod
    def close(self, grace: float) -> None:
        """Leave in order: give what is queued `grace` seconds to arrive, then end the session. May be called again."""

    @abstractmethod
    def abort(self) -> None:
        """Disconnect at once and without a goodbye, as a process that is killed does. May be called again."""


class ServerTransport(ABC):
    """The global server's connections to all peers. Any thread may call any method.

    Attributes:
        max_message: the longest bulk message that sessions take which begin from now on, in bytes; None: what the
            transport allows.
        max_queued: memory for messages to all ranks of one site that they have not received, in bytes. Beyond it the
            session of the rank with most of it is void, as if the peer had never entered: it sees GONE, and is told
            everything anew when it enters again.
    """

    max_message: int | None = None
    max_queued: int = 1 << 30

    @abstractmethod
    def start(self, application: Application) -> None:
        """Begin to answer. Until then peers that connect wait; `application` is called from now on."""

    def answer_with(self, responder: Responder) -> None:
        """Let questions from outside any session be answered; a transport that carries none ignores it."""
        del responder

    @abstractmethod
    def send(self, peer: Peer, data: Outgoing, *, control: bool = False) -> bool:
        """Queue a message for a peer and return at once.

        The memory must not be written to until the peer has the message. What is sent while `Application.enter`
        admits the peer belongs to the session that begins.

        Args:
            peer: the receiver.
            data: the message.
            control: whether it is a control message, which bulk messages do not delay.

        Returns:
            False if the peer has no session, so that nobody will receive the message; also if the peer has not taken
            what it was sent before, and its session ends with this.
        """

    @abstractmethod
    def sessions(self) -> dict[Peer, SessionStatus]:
        """Return the present sessions by peer."""

    @abstractmethod
    def traffic_of(self, peer: Peer) -> Traffic:
        """Bytes given to the network for a peer and taken from it, over all its sessions."""

    @abstractmethod
    def socket_bytes(self) -> dict[Peer, Traffic]:
        """Bytes that crossed the sockets of each peer, TLS and gRPC included, since the server started.

        Call it every few seconds: what a connection carried after the last call before its end is not counted.
        Peers are missing where sockets cannot be counted.
        """

    @abstractmethod
    def drop(self, peer: Peer, why: str) -> None:
        """End a peer's session. The peer sees REFUSED with `why`; it may enter again if the application admits it."""

    @abstractmethod
    def stop(self, grace: float) -> None:
        """Give what is queued `grace` seconds to arrive, then disconnect. May be called again.

        No `on_lost` follows for the sessions that end with it.
        """

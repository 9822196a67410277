"""The transport between the sites and the global server: what the rest of the runtime may ask of it.

A transport carries whole messages, each once and in order, in both directions between one global server and
any number of sites. It knows nothing of what the messages mean. Two implementations keep this contract:

    grpc_client.GrpcClient, grpc_server.GrpcServer    gRPC over several TCP connections, with mutual TLS
    in_memory.InMemoryClient, in_memory.InMemoryServer    queues between threads of one process

Lifetime of a session:

    client.enter(request)    the server's `Application.enter` admits the site or refuses it. Admission starts a
                             session and ends an earlier session of the same site, whose queues are dropped.
    client.start()           messages begin to flow.
    ... the connection may be lost and restored any number of times; the session and its messages survive ...
    client.close(grace)      the site leaves in order: `Application.on_lost(site, left=True)`.
    server.drop(site, why)   the server ends the session; the client sees the event REFUSED.
    server.stop(grace)       the server goes away; the client sees LOST, and GONE once a new server answers.

A site has one session at a time. If another process enters under the same name, the earlier process sees GONE,
and its attempts to enter again are refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

Data: TypeAlias = bytes | bytearray | memoryview


class LinkEvent(str, Enum):
    """What happened to a site's connection."""

    CONNECTED = "connected"
    """Messages flow."""
    LOST = "lost"
    """No connection is open. The transport reconnects by itself, and the session's messages are kept."""
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
    """A site that asks to enter: the name it claims, and what its certificate proves.

    Attributes:
        site: the name that the site claims.
        incarnation: identifies the process; a restarted site has another one.
        request: the bytes given to `ClientTransport.enter`; empty when only the peer is checked.
        peer_name: the common name in the peer's certificate; None without TLS.
        peer_serial: the serial number of that certificate; None without TLS.
        peer_address: where the peer connects from, for logs.
    """

    site: str
    incarnation: str
    request: bytes
    peer_name: str | None
    peer_serial: int | None
    peer_address: str


@dataclass(frozen=True)
class SessionStatus:
    """A session at one moment: who, over how many open streams, and how much is still on its way to the site."""

    incarnation: str
    streams: int
    unacknowledged_bytes: int


class Application(Protocol):
    """What a server transport calls, from threads of its own.

    For one site, `enter`, `on_message` and `on_lost` never run at the same time; for different sites they may.
    """

    def check_peer(self, entry: EntryRequest) -> None:
        """Raise a WeightGradError unless this peer may connect.

        Called before `enter` and whenever a peer connects. A transport with certificates also calls it every few
        seconds for peers that are connected, so that a revoked certificate ends a session.
        """

    def enter(self, entry: EntryRequest) -> bytes:
        """Admit a site and return the reply, or raise a WeightGradError whose text the site is shown.

        RefusedError, CredentialsError and ProtocolError are refusals. A LinkError asks the site to try again.
        """

    def on_message(self, site: str, data: memoryview) -> None:
        """Take a message. The memory belongs to the application for as long as it keeps the view.

        A WeightGradError ends the session, and the site is shown its text. While this call blocks, further
        messages of the site wait.
        """

    def on_lost(self, site: str, left: bool) -> None:
        """Note that a site is not connected any more.

        Args:
            site: the site.
            left: True if the site closed its session in order. False if it was refused, or if it has been
                without a connection for some seconds; in the latter case the session continues if the site comes back.
        """

    def on_refused(self, reason: str) -> None:
        """Count a peer that the transport itself refused before `enter` was called. `reason` is a fixed phrase."""


class ClientTransport(ABC):
    """One site's connection to the global server.

    Any thread may call any method. Nothing is sent before `enter` and `start`; after `close` or `abort` the
    object cannot be used again.
    """

    address: str
    """The address of the server, for messages to people."""
    why: str
    """The text that explains the last LOST, GONE or REFUSED; empty before the first."""
    traffic: Traffic
    """Bytes given to the network and taken from it, repeated ones included."""

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
    def send(self, data: Data) -> None:
        """Queue a message and return at once. Its memory must not be written to until it has been sent.

        In a session that is GONE the message is dropped, like everything that was queued there.

        Raises:
            RefusedError: the server has ended the session on purpose.
            LinkError: there is no session.
        """

    @abstractmethod
    def receive(self, timeout: float = 0.0) -> memoryview | None:
        """Return the next message.

        Args:
            timeout: seconds to wait for one. An event ends the wait early.

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
        """Bytes of messages that were queued and are not known to have arrived."""

    @abstractmethod
    def wait_sent(self, timeout: float) -> bool:
        """Wait until the server has everything; False if that took longer, or if the session ended."""

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
    """The global server's connections to all sites. Any thread may call any method."""

    @abstractmethod
    def start(self, application: Application) -> None:
        """Begin to answer. Until then peers that connect wait; `application` is called from now on."""

    @abstractmethod
    def send(self, site: str, data: Data) -> bool:
        """Queue a message for a site and return at once.

        The memory must not be written to until the site has the message. What is sent while `Application.enter`
        admits the site belongs to the session that begins.

        Returns:
            False if the site has no session, so that nobody will receive the message.
        """

    @abstractmethod
    def sessions(self) -> dict[str, SessionStatus]:
        """Return the present sessions by site."""

    @abstractmethod
    def traffic_of(self, site: str) -> Traffic:
        """Bytes given to the network for a site and taken from it, over all its sessions."""

    @abstractmethod
    def socket_bytes(self) -> dict[str, Traffic]:
        """Bytes that crossed the sockets of each site, TLS and gRPC included, since the server started.

        Call it every few seconds: what a connection carried after the last call before its end is not counted.
        Sites are missing where sockets cannot be counted.
        """

    @abstractmethod
    def drop(self, site: str, why: str) -> None:
        """End a site's session. The site sees REFUSED with `why`; it may enter again if the application admits it."""

    @abstractmethod
    def stop(self, grace: float) -> None:
        """Give what is queued `grace` seconds to arrive, then disconnect. May be called again.

        No `on_lost` follows for the sessions that end with it.
        """

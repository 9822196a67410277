"""The channels under a client of the gRPC transport: what `GrpcClient` asks of gRPC, and no more.

Two implementations keep this contract:

    grpc_channels.GrpcChannels          gRPC in this process
    process_channels.ProcessChannels    gRPC in a process of its own, so that this one can be forked

A client has several channels, each with a TCP connection of its own. Statuses are named as gRPC names them ("OK",
"UNAVAILABLE"), because a process that trains does not load gRPC.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from weightgrad.runtime.transport.transport import Data, Traffic

# The names below are part of the protocol and stay as they are, whatever the code is called.
SERVICE = "weightgrad.Transport"
ENTER = f"/{SERVICE}/Enter"
STREAM = f"/{SERVICE}/Stream"
ASK = f"/{SERVICE}/Ask"
MEASURE = f"/{SERVICE}/Measure"

Metadata: TypeAlias = Sequence[tuple[str, str]]
Options: TypeAlias = list[tuple[str, int | str]]
"""The arguments of one gRPC channel."""


class Status(NamedTuple):
    """How a call ended: the name of gRPC's status code, and a text for people."""

    code: str
    why: str


class CallError(Exception):
    """A call that failed. It never leaves the transport."""

    def __init__(self, status: Status) -> None:
        super().__init__(f"{status.code}: {status.why}")
        self.status = status


class Call(ABC):
    """A stream of records each way."""

    @abstractmethod
    def __iter__(self) -> Iterator[Data]:
        """Yield what the server sends, until the call ends for any reason. A record is valid until the next one."""

    @abstractmethod
    def status(self) -> Status:
        """How the call ended; known when the iteration is over."""

    @abstractmethod
    def cancel(self) -> None:
        """End the call from any thread. May be called again."""


class Channels(ABC):
    """The channels of one client. Any thread may call any method."""

    address: str
    """The server's HOST:PORT."""
    count: int
    """How many channels there are."""

    @abstractmethod
    def ask(self, request: bytes, metadata: Metadata, timeout: float) -> tuple[bytes, Mapping[str, str]]:
        """Call `ENTER` on channel 0.

        Returns:
            The server's reply, and the metadata that came with it.

        Raises:
            CallError: the call failed, or took longer than `timeout` seconds.
            LinkError: there is no gRPC to ask.
        """

    @abstractmethod
    def open(self, number: int, records: Iterator[bytes], metadata: Metadata, last: bytes = b"") -> Call:
        """Call `STREAM` on a channel, as soon as it is connected.

        Args:
            number: the channel.
            records: what is to be sent; a thread of its own takes them, and the call is half closed at their end.
            metadata: who calls.
            last: a record for the server in case this process ends without closing the call, however it ends. gRPC in
                this process cannot send it.

        Raises:
            LinkError: there is no gRPC to ask.
        """

    @abstractmethod
    def socket_bytes(self) -> tuple[Traffic | None, float]:
        """Bytes that crossed the sockets to the server, or None, and the shortest round trip in seconds, or 0."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect at once; calls that are open are cancelled. May be called again."""

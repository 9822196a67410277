"""Every implementation of `transport.py`, for the tests of its contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from weightgrad.lab.run.launch import free_port
from weightgrad.runtime.transport.channels import Channels
from weightgrad.runtime.transport.grpc_channels import GrpcChannels
from weightgrad.runtime.transport.grpc_client import GrpcClient
from weightgrad.runtime.transport.grpc_server import GrpcServer
from weightgrad.runtime.transport.grpc_sessions import TransportLimits
from weightgrad.runtime.transport.grpc_settings import Keepalive, channel_options
from weightgrad.runtime.transport.in_memory import InMemoryNetwork
from weightgrad.runtime.transport.in_memory_client import InMemoryClient
from weightgrad.runtime.transport.in_memory_server import InMemoryServer
from weightgrad.runtime.transport.process_channels import ProcessChannels
from weightgrad.runtime.transport.transport import ClientTransport, Peer, ServerTransport

from .harness import OSLO, TIMEOUT_S, RecordingApplication

QUICK = channel_options(keepalive=Keepalive(every_s=1.0, timeout_s=1.0))


class Implementation(ABC):
    """Makes servers at one address, and clients that reach it."""

    address: str

    @abstractmethod
    def make_server(self) -> ServerTransport: ...

    @abstractmethod
    def make_client(self, peer: Peer, incarnation: int) -> ClientTransport: ...

    @abstractmethod
    def wait_queued(self, client: ClientTransport) -> None:
        """Wait until the server has what the client sent, taken by the application or not."""

    @contextmanager
    def server(self, application: RecordingApplication) -> Iterator[ServerTransport]:
        made = self.make_server()
        made.start(application)
        try:
            yield made
        finally:
            made.stop(0.0)

    @contextmanager
    def client(self, peer: Peer = OSLO, incarnation: int = 1, *, start: bool = True) -> Iterator[ClientTransport]:
        made = self.make_client(peer, incarnation)
        try:
            if start:
                assert made.enter(b"oslo", TIMEOUT_S) == b"welcome oslo"
                made.start()
            yield made
        finally:
            made.close(0.0)


class OverGrpc(Implementation):
    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"

    def make_server(self) -> ServerTransport:
        return GrpcServer(self.address, credentials=None, limits=TransportLimits(lost_after_s=0.5))

    def make_client(self, peer: Peer, incarnation: int) -> ClientTransport:
        return GrpcClient(self.make_channels(), site=peer.site, rank=peer.rank, incarnation=incarnation)

    def make_channels(self) -> Channels:
        return GrpcChannels(self.address, credentials=None, options=QUICK)

    def wait_queued(self, client: ClientTransport) -> None:
        assert client.wait_sent(TIMEOUT_S)


class OverProcess(OverGrpc):
    """The connections of the clients are in another process."""

    def make_channels(self) -> Channels:
        return ProcessChannels(self.address, credentials=None, options=QUICK)


class InMemory(Implementation):
    def __init__(self) -> None:
        self.address, self._network = "hub", InMemoryNetwork()

    def make_server(self) -> ServerTransport:
        return InMemoryServer(self._network, self.address)

    def make_client(self, peer: Peer, incarnation: int) -> ClientTransport:
        return InMemoryClient(self._network, self.address, site=peer.site, rank=peer.rank, incarnation=incarnation)

    def wait_queued(self, client: ClientTransport) -> None:
        pass  # `send` puts it there

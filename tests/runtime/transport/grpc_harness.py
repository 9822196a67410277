"""What the tests of the gRPC transport share: servers, clients, and a line between them that can fail and be slow."""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from weightgrad.runtime.transport.channels import Channels
from weightgrad.runtime.transport.grpc_channels import GrpcChannels
from weightgrad.runtime.transport.grpc_client import GrpcClient
from weightgrad.runtime.transport.grpc_server import GrpcServer
from weightgrad.runtime.transport.grpc_settings import Keepalive, channel_options
from weightgrad.runtime.transport.process_channels import ProcessChannels

from .harness import TIMEOUT_S, RecordingApplication

QUICK = Keepalive(every_s=1.0, timeout_s=1.0)


class Place(RecordingApplication):
    """A gRPC server that keeps what it gets."""

    def __init__(self, listen: str = "127.0.0.1:0", *, credentials: Any = None, limits: Any = None) -> None:
        super().__init__()
        self.server = GrpcServer(listen, credentials=credentials, limits=limits)
        self.server.start(self)
        self.address = f"127.0.0.1:{self.server.port}"


@contextmanager
def place(listen: str = "127.0.0.1:0", **more: Any) -> Iterator[Place]:
    made = Place(listen, **more)
    try:
        yield made
    finally:
        made.server.stop(0.0)


@contextmanager
def site(
    address: str,
    name: str = "oslo",
    incarnation: str | int = 1,
    *,
    start: bool = True,
    credentials: grpc.ChannelCredentials | None = None,
    keepalive: Keepalive = QUICK,
    streams: int = 4,
    server_name_override: str | None = None,
    here: bool = False,
    **more: Any,
) -> Iterator[GrpcClient]:
    """A client as sites have it; or, with `here` or credentials of gRPC, with gRPC in this process."""
    options = channel_options(streams=streams, keepalive=keepalive, server_name_override=server_name_override)
    channels: Channels = (
        ProcessChannels(address, credentials=None, options=options)
        if credentials is None and not here
        else GrpcChannels(address, credentials=credentials, options=options)
    )
    client = GrpcClient(channels, site=name, incarnation=incarnation, **more)
    try:
        if start:
            assert client.enter(b"oslo", TIMEOUT_S) == b"welcome oslo"
            client.start()
        yield client
    finally:
        client.close(0.0)


class Proxy:
    """A TCP proxy that can be cut: it hangs up on everybody, or falls silently.

    With `bit_s`, everything that passes shares a line of that speed, on which all connections get their turns.
    """

    def __init__(self, address: str, *, bit_s: float = math.inf) -> None:
        self.bit_s = bit_s
        self._line_free_at = 0.0
        self._turn = threading.Lock()
        host, port = address.split(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = threading.Event()
        self._open.set()
        self._hung_up = 0
        self._closed = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self, *, silently: bool = False) -> None:
        self._open.clear()
        if not silently:
            self._hung_up += 1

    def heal(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._closed = True
        self.cut()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            if not select.select([self._listener], [], [], 0.05)[0]:
                continue
            ours, _ = self._listener.accept()
            if not self._open.is_set():
                ours.close()
                continue
            theirs = socket.create_connection(self._target)
            self._threads.append(threading.Thread(target=self._carry, args=(ours, theirs), daemon=True))
            self._threads[-1].start()

    def _carry(self, ours: socket.socket, theirs: socket.socket) -> None:
        hung_up = self._hung_up
        with ours, theirs:
            while hung_up == self._hung_up and not self._closed:
                for source in select.select([ours, theirs], [], [], 0.05)[0]:
                    while not self._open.wait(0.05):
                        if hung_up != self._hung_up or self._closed:
                            return
                    try:
                        data = source.recv(1 << 18 if self.bit_s == math.inf else 1 << 14)
                        self._wait_for_line(len(data))
                        (theirs if source is ours else ours).sendall(data)
                    except OSError:
                        return
                    if not data:
                        return

    def _wait_for_line(self, nbytes: int) -> None:
        with self._turn:
            self._line_free_at = max(time.monotonic(), self._line_free_at) + 8 * nbytes / self.bit_s
            wait = self._line_free_at - time.monotonic()
        time.sleep(max(0.0, wait))


@contextmanager
def proxy(address: str, *, bit_s: float = math.inf) -> Iterator[Proxy]:
    made = Proxy(address, bit_s=bit_s)
    try:
        yield made
    finally:
        made.close()

"""What only a modelled network does: relays that share a rate, keep bytes over a cut, and slow down for loss."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from weightgrad.errors import EmulatorError
from weightgrad.lab.emulate import ModelledWan, WanLink
from weightgrad.lab.sim.links import Link

from .networks import PYTHON, end, started, until

ENDS = ("hub", "east")
STREAM = 1448 / 1514  # of the line


@contextlib.contextmanager
def listening(network: ModelledWan) -> Iterator[tuple[socket.socket, tuple[str, int]]]:
    """A listener on hub, and where east finds it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        ip, port = network.reach("east", "hub", listener.getsockname()[1]).split(":")
        yield listener, (ip, int(port))


def test_bytes_take_their_time_and_arrive_whole() -> None:
    data = bytes(range(256)) * 2000  # 512 kB: 0.43 s at 10 Mbit/s
    with ModelledWan(ENDS, [WanLink(ENDS, 10e6, 0.05)]) as wan, listening(wan) as (listener, address):
        with socket.create_connection(address) as client:
            began = time.monotonic()
            threading.Thread(target=_send, args=(client, data)).start()
            server, _ = listener.accept()
            with server:
                got = b""
                while piece := server.recv(1 << 16):
                    got += piece
                took = time.monotonic() - began
                assert got == data
                ideal = 8 * len(data) / (10e6 * STREAM) + 3 * 0.05  # handshake and the way
                assert ideal - 0.02 < took < ideal + 1.0
                server.sendall(b"answer")  # the other direction is still open
            assert client.recv(99) == b"answer"
            assert client.recv(99) == b""
        found = wan.stats().pairs["east", "hub"]
        assert found.bytes == len(data) + 66 * found.packets
        assert found.packets == -(-len(data) // 1448)


def _send(one: socket.socket, data: bytes) -> None:
    one.sendall(data)
    one.shutdown(socket.SHUT_WR)


def test_connections_share_the_rate() -> None:
    with ModelledWan(ENDS, [WanLink(ENDS, 8e6, 0.01)]) as wan, listening(wan) as (listener, address):
        counts = [0, 0]

        def drain(place: int, one: socket.socket) -> None:
            with one, contextlib.suppress(ConnectionError):
                while got := one.recv(1 << 16):
                    counts[place] += len(got)

        clients = [socket.create_connection(address) for _ in counts]
        threads = [threading.Thread(target=drain, args=(i, listener.accept()[0])) for i in range(2)]
        for one in clients:
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for thread in threads:
            thread.start()
        until(lambda: _push(clients) or min(counts) > 10_000)
        before, began = list(counts), time.monotonic()
        until(lambda: _push(clients) or time.monotonic() > began + 1.0)
        rates = [8 * (a - b) / (time.monotonic() - began) for a, b in zip(counts, before, strict=True)]
        for one in clients:
            one.close()
        for thread in threads:
            thread.join()
        assert sum(rates) == pytest.approx(8e6 * STREAM, rel=0.15)
        assert min(rates) > 0.6 * max(rates)


def _push(clients: list[socket.socket]) -> bool:
    for one in clients:
        with contextlib.suppress(BlockingIOError):
            one.send(bytes(65536))
    return False


def test_a_cut_keeps_connections_and_bytes() -> None:
    with (
        ModelledWan(ENDS, [WanLink(ENDS, 10e6, 0.01)]) as wan,
        listening(wan) as (listener, address),
        socket.create_connection(address) as client,
    ):
        client.sendall(b"one")
        with listener.accept()[0] as server:
            server.settimeout(20)
            assert server.recv(99) == b"one"
            wan.cut(*ENDS)
            client.sendall(b"two")
            server.sendall(b"back")
            for one in (server, client):
                one.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    one.recv(99)
                one.settimeout(20)
            with socket.create_connection(address) as late:  # waits for the link, too
                late.sendall(b"three")
                wan.heal(*ENDS)
                assert server.recv(99) == b"two"
                assert client.recv(99) == b"back"
                with listener.accept()[0] as second:
                    assert second.recv(99) == b"three"


def test_ends_that_hang_up_are_told_to_the_other() -> None:
    with ModelledWan(ENDS, [WanLink(ENDS, 10e6, 0.01)]) as wan, listening(wan) as (listener, address):
        client = socket.create_connection(address)
        server, _ = listener.accept()
        client.close()
        with server:
            server.settimeout(20)
            assert server.recv(99) == b""
        listener.close()
        with socket.create_connection(address) as client, contextlib.suppress(ConnectionError):
            client.settimeout(20)
            assert client.recv(99) == b""  # nobody listens there any more


def test_loss_leaves_the_rate_that_the_simulator_says() -> None:
    link = WanLink(ENDS, 100e6, 0.04, loss=0.01)
    with ModelledWan(ENDS, [link]) as wan:
        direction = wan._opened._directions["hub", "east"]
        assert direction._rate == pytest.approx(Link(ENDS, 100e6, 0.04, loss=0.01).rate_bytes(0.0) * STREAM)
        assert direction._rate < 1.0e6
        wan.set_link(*ENDS, loss=0.0)
        assert direction._rate == pytest.approx(100e6 / 8 * STREAM)


def test_it_says_that_it_is_modelled() -> None:
    with ModelledWan(ENDS, [WanLink(ENDS, 10e6, 0.01)]) as wan:
        assert wan.describe()["kind"] == "modelled"
        assert wan.host("hub").address == "127.0.0.1"
        assert wan.reach("hub", "hub", 80) == "127.0.0.1:80"
        assert wan.reach("hub", "east", 80) == wan.reach("hub", "east", 80)
        process, _ = started(wan.host("hub"), [*PYTHON, "import time; print(1, flush=True); time.sleep(1000)"])
    assert process.wait(20) == -9
    end(process)
    with pytest.raises(EmulatorError, match="not open"):
        wan.stats()
    wan.close()  # twice does no harm

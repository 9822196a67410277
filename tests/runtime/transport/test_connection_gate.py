"""Strangers at the port: how many of their connections stay open, for how long, and that sites do not notice."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from weightgrad.errors import SpecError
from weightgrad.runtime.transport.connection_gate import ConnectionGate, GateLimits, connections, raise_file_limit

LIMIT_S = 120.0


class Port:
    """A port of this process, and connections to it."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = int(self.listener.getsockname()[1])
        self.ours: list[socket.socket] = []
        self.theirs: list[socket.socket] = []

    def connect(self, count: int = 1, host: str = "127.0.0.1") -> list[str]:
        """Connect so often; the endpoints."""
        made = [socket.create_connection(("127.0.0.1", self.port), source_address=(host, 0)) for _ in range(count)]
        self.theirs += made
        self.ours += [self.listener.accept()[0] for _ in made]
        return ["{}:{}".format(*one.getsockname()) for one in made]

    def open(self) -> set[str]:
        """The endpoints whose connections have not been shut down."""
        found = set()
        for one in self.theirs:
            one.setblocking(False)
            try:
                if one.recv(1) != b"":
                    found.add("{}:{}".format(*one.getsockname()))
            except BlockingIOError:
                found.add("{}:{}".format(*one.getsockname()))
        return found


@pytest.fixture(name="port")
def fixture_port() -> Iterator[Port]:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    made = Port()
    yield made
    for one in (*made.ours, *made.theirs, made.listener):
        one.close()


def test_a_connection_that_no_site_uses_is_ended_in_time(port: Port) -> None:
    refused: list[str] = []
    gate = ConnectionGate(port.port, GateLimits(handshake_s=10.0), refused.append)
    (site,) = port.connect()
    (stranger,) = port.connect()
    gate.prove(site, "east")
    assert gate.look(100.0) == 0
    assert gate.look(109.0) == 0
    assert gate.look(110.0) == 1
    assert port.open() == {site}
    assert gate.look(111.0) == 0, "once"
    assert refused == ["no handshake in time, or too many connections"]
    assert stranger not in port.open()


def test_of_one_address_only_so_many_stay_and_others_are_not_touched(port: Port) -> None:
    gate = ConnectionGate(port.port, GateLimits(per_address=3), lambda reason: None)
    first = port.connect(3, "127.0.0.2")
    gate.look(1.0)
    site, others = port.connect(1), port.connect(5, "127.0.0.2")
    assert gate.look(2.0) == 5
    assert port.open() == {*first, *site}
    assert not port.open() & set(others)


def test_in_all_only_so_many_stay_and_the_address_with_most_loses_them(port: Port) -> None:
    gate = ConnectionGate(port.port, GateLimits(in_all=4), lambda reason: None)
    honest = port.connect(2)
    port.connect(6, "127.0.0.2")
    assert gate.look(1.0) == 4
    assert set(honest) <= port.open()


def test_a_site_keeps_only_a_few_connections_that_it_does_not_use(port: Port) -> None:
    """Each was proven by a call of a site; otherwise one site could take all that the server may have."""
    used: set[str] = set()
    gate = ConnectionGate(port.port, GateLimits(idle_per_site=2, idle_s=60.0), lambda reason: None, lambda: used)
    ours, others, idle = port.connect(4), port.connect(2), port.connect(5)
    used |= set(ours)
    for peer in (*ours, *idle):
        gate.prove(peer, "west")
    for peer in others:
        gate.prove(peer, "east")
    now = time.monotonic()
    assert gate.look(now) == 3
    assert port.open() == {*ours, *others, *idle[:2]}
    assert gate.look(now + 61.0) == 4, "and none of them for ever"
    assert port.open() == set(ours)
    assert gate.look(now + 1000.0) == 0
    used.clear()
    assert gate.look(now + 1030.0) == 2, "a session has ended"


def test_proven_connections_count_as_nobodys(port: Port) -> None:
    gate = ConnectionGate(port.port, GateLimits(per_address=1, in_all=1), lambda reason: None)
    sites = port.connect(8)
    for site in sites:
        gate.prove(site, "east")
    assert gate.look(1.0) == 0
    assert gate.look(1000.0) == 0
    assert port.open() == set(sites)


def test_connections_of_other_ports_are_not_seen(port: Port) -> None:
    port.connect(2)
    assert len(connections(port.port)) == 2
    assert not connections(1)


@pytest.mark.parametrize("name", ["per_address", "in_all", "handshake_s"])
def test_limits_that_make_no_sense(name: str) -> None:
    with pytest.raises(SpecError, match=name):
        GateLimits(**{name: 0})


def test_the_limit_of_open_files_is_raised_to_what_the_system_allows() -> None:
    code = (
        "import resource; from weightgrad.runtime.transport.connection_gate import raise_file_limit;"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard));"
        "assert raise_file_limit() == hard; assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)


SERVER = """
import resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from weightgrad.runtime.transport.connection_gate import GateLimits
from weightgrad.runtime.transport.grpc_server import GrpcServer
from weightgrad.runtime.transport.grpc_sessions import TransportLimits
class Open:
    def check_peer(self, entry): pass
    def enter(self, entry): return b""
    def on_message(self, peer, data, control): pass
    def on_lost(self, peer, left): pass
    def on_refused(self, reason): pass
server = GrpcServer("127.0.0.1:0", credentials=None, limits=TransportLimits(gate=GateLimits(per_address=16)))
server.start(Open())
print(server.port, flush=True)
for line in sys.stdin:
    try:
        with open("/dev/null"), open("/dev/zero"):
            print("ok", flush=True)
    except OSError as error:
        print(error, flush=True)
"""


def test_a_server_with_few_files_can_write_its_state_while_strangers_connect() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    strangers: list[socket.socket] = []
    try:
        assert server.stdout is not None
        assert server.stdin is not None
        port = int(server.stdout.readline())
        for number in range(600):
            strangers.append(socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S))
            if number % 50 == 49:
                server.stdin.write("look\n")
                assert server.stdout.readline() == "ok\n"
        limit = time.monotonic() + LIMIT_S
        while sum(_ended(one) for one in strangers) < 600 - 16:
            assert time.monotonic() < limit, "the strangers stay"
            time.sleep(0.1)
    finally:
        server.kill()
        server.communicate()
        for one in strangers:
            one.close()


def _ended(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        while data := one.recv(4096):
            del data
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def test_limits_of_this_process_are_known() -> None:
    assert raise_file_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[1]

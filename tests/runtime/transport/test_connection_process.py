"""gRPC in a process of its own: it ends with its parent, its death is survived, and its parent can be forked."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightgrad.errors import LinkError
from weightgrad.runtime.transport import connection_process
from weightgrad.runtime.transport.connection_process import ConnectionProcess
from weightgrad.runtime.transport.grpc_settings import channel_options
from weightgrad.runtime.transport.process_channels import ProcessChannels

from .grpc_harness import place, site
from .harness import OSLO, TIMEOUT_S, exchange, until, wait_event

linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")

FORKS = 200

PARENT = """
import os, sys, time
from weightgrad.runtime.transport import connection_process
from weightgrad.runtime.transport.grpc_client import GrpcClient
from weightgrad.runtime.transport.grpc_settings import channel_options
from weightgrad.runtime.transport.process_channels import ProcessChannels
channels = ProcessChannels(sys.argv[1], credentials=None, options=channel_options())
client = GrpcClient(channels, site="oslo", incarnation=1)
client.enter(b"", 60)
client.start()
"""

CHILD_LIVES_ON = """
if os.fork() == 0:
    time.sleep(600)
    os._exit(0)
client.send(b"hello")
client.wait_sent(60)
print(connection_process.shared().pid, flush=True)
time.sleep(600)
"""

FORKS_WHILE_IT_SENDS = f"""
import gc, logging, threading
sent, ended = 0, threading.Event()
def keep_sending():
    global sent
    while not ended.is_set():
        client.send(bytes(300_000))
        client.send(b"report", control=True)
        client.wait_sent(60)
        sent += 1
sender = threading.Thread(target=keep_sending)
sender.start()
failed = []
for number in range({FORKS}):
    child = os.fork()
    if child == 0:
        thorough = number % 20 == 0  # which takes a while with all of torch in memory
        gc.collect(2 if thorough else 0)
        logging.getLogger("child").warning("alive")
        sys.exit(0) if thorough else os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        failed.append(status)
ended.set()
sender.join()
client.close(30)
print(failed, sent > 0, "grpc" in sys.modules)
"""


@pytest.fixture
def process() -> Iterator[ConnectionProcess]:
    """The process of this process's connections."""
    with place() as host, site(host.address):
        yield connection_process.shared()


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@linux
def test_it_loads_grpc_and_not_torch(process: ConnectionProcess) -> None:
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "cygrpc" in maps
    assert "libtorch" not in maps


def test_one_process_for_all_clients(process: ConnectionProcess) -> None:
    with place() as host, site(host.address), site(host.address, "lima"):
        assert connection_process.shared() is process


def test_the_death_of_the_process_is_survived_and_told(
    process: ConnectionProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with place() as host, site(host.address) as client:
        wait_event(client, "connected")
        with caplog.at_level(logging.WARNING, "weightgrad"):
            client.send(bytes(3_000_000))
            os.kill(process.pid, signal.SIGKILL)
            wait_event(client, "lost")
            assert client.why == f"the process with this process's connections, {process.pid}, was ended by SIGKILL"
            wait_event(client, "connected")
        assert connection_process.shared().pid != process.pid
        until(lambda: len(host.got[OSLO]) == 1)
        host.got.clear()
        exchange(host, host.server, client, [b"1", bytes(2_000_000)], [b"2", b"control 3"])
        assert "was ended by SIGKILL; it is started again, and the sessions go on" in caplog.text
        assert [entry.site for entry in host.entries] == ["oslo"], "the session goes on"


def test_bytes_on_sockets_are_counted_there(process: ConnectionProcess) -> None:
    with place() as host, site(host.address) as client:
        wait_event(client, "connected")
        client.send(bytes(5_000_000))
        assert client.wait_sent(TIMEOUT_S)
        counted = client.socket_bytes()
        if counted is None:
            pytest.skip("sockets are not counted on this machine")
        assert 5_000_000 <= counted.sent < 5_500_000
        assert client.round_trip_s > 0
        os.kill(connection_process.shared().pid, signal.SIGKILL)
        wait_event(client, "lost")
        wait_event(client, "connected")
        after = client.socket_bytes()
        assert after is not None
        assert after.sent >= counted.sent, "what went through a process that has ended counts"


def test_a_request_for_a_client_that_was_closed_is_not_answered_and_harms_nobody(process: ConnectionProcess) -> None:
    for what in ("count", "close", "stream", "enter"):
        with process.ask({"do": what, "client": -1}) as answer:
            answer.settimeout(TIMEOUT_S)
            assert answer.recv(1) == b""
    assert process.alive


def test_no_interpreter_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(LinkError, match=r"cannot start a process for the connections .*/nowhere/python"):
        ConnectionProcess()


def test_channels_that_were_closed() -> None:
    channels = ProcessChannels("127.0.0.1:1", credentials=None, options=channel_options())
    channels.close()
    channels.close()
    with pytest.raises(LinkError, match=r"the connection to 127\.0\.0\.1:1 was closed"):
        channels.ask(b"", (), 1.0)


@linux
def test_it_ends_when_its_parent_is_killed_though_a_forked_child_lives() -> None:
    with place() as host:
        command = [sys.executable, "-c", PARENT + CHILD_LIVES_ON, host.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as parent:
            try:
                assert parent.stdout is not None
                pid = int(parent.stdout.readline())
                assert running(pid)
                parent.kill()
                began = time.monotonic()
                until(lambda: not running(pid))
                until(lambda: not host.server.sessions().get(OSLO) or host.server.sessions()[OSLO].streams == 0)
                assert time.monotonic() - began < TIMEOUT_S
            finally:
                os.killpg(parent.pid, signal.SIGKILL)  # the child


def test_two_hundred_forks_while_messages_flow() -> None:
    with place() as host:
        host.take = lambda peer, data: None  # thousands of messages are not kept
        command = [sys.executable, "-c", PARENT + FORKS_WHILE_IT_SENDS, host.address]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=2 * TIMEOUT_S)
        assert ran.returncode == 0, ran.stderr[-3000:]
        assert ran.stdout == "[] True False\n", ran.stderr[-3000:]
        assert ran.stderr.count("alive") == FORKS
        assert len(host.lanes[OSLO]) >= 2

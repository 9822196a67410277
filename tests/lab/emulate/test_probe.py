"""The server of the emulator's self-check survives whatever its clients do."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator

import pytest

from weightgrad.lab.emulate.namespaces import HERE, PYTHON


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [*PYTHON, str(HERE / "probe.py"), "serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


def report(process: subprocess.Popen[str], number: int) -> list[tuple[float, int]]:
    assert process.stdin is not None
    assert process.stdout is not None
    print(number, file=process.stdin, flush=True)
    found: list[tuple[float, int]] = json.loads(process.stdout.readline())
    return found


def test_a_report_while_the_flood_goes_on(server: tuple[subprocess.Popen[str], int]) -> None:
    """The report and bytes of the flood are waiting in the same turn of the server."""
    process, port = server
    assert process.stdin is not None
    assert process.stdout is not None
    with socket.create_connection(("127.0.0.1", port)) as flood:
        flood.sendall(b"f" + struct.pack("!I", 7))
        with socket.create_connection(("127.0.0.1", port)) as echo:  # when it answers, the flood is known
            echo.sendall(b"e")
            echo.sendall(b".")
            assert echo.recv(1) == b"."
        os.kill(process.pid, signal.SIGSTOP)
        print(7, file=process.stdin, flush=True)
        flood.sendall(bytes(1000))
        os.kill(process.pid, signal.SIGCONT)
        json.loads(process.stdout.readline())
    assert report(process, 99) == []
    assert process.poll() is None


def test_clients_that_end_at_once(server: tuple[subprocess.Popen[str], int]) -> None:
    process, port = server
    for hello in (b"", b"f", b"f\x00", b"x"):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closes with a reset
            client.sendall(hello)
    assert report(process, 99) == []
    assert process.poll() is None

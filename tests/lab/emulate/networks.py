"""Small networks to try things on, and the programs that run on their hosts."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import weightgrad
from weightgrad.errors import NamespacesRefusedError
from weightgrad.lab.emulate import Host, Network, WanLink, open_wan

KINDS = ["root", "rootless", "modelled"]
PACKAGE = Path(weightgrad.__file__).parent
TIMEOUT_S = 30.0  # for a busy machine; nothing here should need it
PYTHON = (sys.executable, "-I", "-S", "-c")

# The emulator alone, without the package around it, whose torch takes seconds to import.
ALONE = """
import sys, types
for name in ("weightgrad", "weightgrad.lab", "weightgrad.lab.emulate", "weightgrad.lab.sim"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [name.replace("weightgrad", {package!r}).replace(".", "/")]
from weightgrad.lab.emulate.{module} import {name}
from weightgrad.lab.emulate.topology import WanLink
"""

# Receives one connection; says how much has come for every line it is given. The bytes must count up.
SINK = """
import select, socket, sys
listener = socket.create_server(("0.0.0.0", 0)); print(listener.getsockname()[1], flush=True)
one, total, pattern = None, 0, bytes(range(256)) * 512
while True:
    for ready in select.select([one or listener, 0], [], [])[0]:
        if ready == 0:
            if not sys.stdin.readline(): sys.exit()
            print(total, flush=True)
        elif one is None:
            one = listener.accept()[0]
        else:
            data = one.recv(65536)
            if not data: sys.exit("the connection has ended")
            assert pattern[total % 256 :].startswith(data), "not the bytes that were sent"
            total += len(data)
"""
SOURCE = """
import socket, sys
one, pattern = socket.create_connection((sys.argv[1], int(sys.argv[2]))), bytes(range(256)) * 64
while True: one.sendall(pattern)
"""


@functools.cache
def refusal(kind: str) -> str | None:
    """Why this machine does not have that kind."""
    try:
        open_wan(["lone"], [], kind=kind).close()
    except NamespacesRefusedError as error:
        return str(error)
    return None


def need(kind: str) -> None:
    """Skip where namespaces are really not available."""
    if (why := refusal(kind)) is not None:
        pytest.skip(why)


def pair(kind: str, rate: float = 50e6, delay: float = 0.005, **more: Any) -> Network:
    """Two hosts and a link."""
    need(kind)
    return open_wan(["hub", "east"], [WanLink(("hub", "east"), rate, delay, **more)], kind=kind)


def until(happened: Callable[[], object], seconds: float = TIMEOUT_S) -> None:
    """Wait for it."""
    limit = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.02)


def started(host: Host, command: Sequence[str], **keywords: Any) -> tuple[Any, str]:
    """A process there, and the first line it has said."""
    process: Any = host.popen(command, stdout=subprocess.PIPE, text=True, **keywords)
    return process, process.stdout.readline().strip()


def end(*processes: Any) -> None:
    """Kill them, and close their pipes."""
    for one in processes:
        one.kill()
        one.communicate(timeout=TIMEOUT_S)


def share_of_a_core() -> float:
    """How much of one this process gets now if it wants all."""
    began, used = time.monotonic(), time.process_time()
    while time.monotonic() < began + 0.5:
        pass
    return (time.process_time() - used) / (time.monotonic() - began)


class Stream:
    """A TCP connection that sends all it can from one host to the other."""

    def __init__(self, wan: Network, sender: str, receiver: str) -> None:
        self._sink, there = started(wan.host(receiver), [*PYTHON, SINK], stdin=subprocess.PIPE)
        ip, port = wan.reach(sender, receiver, int(there)).split(":")
        self._source = wan.host(sender).popen([*PYTHON, SOURCE, ip, port], stderr=subprocess.DEVNULL)

    def __enter__(self) -> Stream:
        until(lambda: self.total() > 0)
        return self

    def __exit__(self, *_: object) -> None:
        end(self._source, self._sink)

    def total(self) -> int:
        """Bytes that have arrived so far."""
        self._sink.stdin.write("\n")
        self._sink.stdin.flush()
        return int(self._sink.stdout.readline())

    def bytes_in(self, seconds: float) -> int:
        """That arrive in so many seconds from now."""
        before = self.total()
        time.sleep(seconds)
        return self.total() - before


def printed(host: Host, code: str, *arguments: str) -> str:
    """What a small Python program prints there."""
    return host.run([*PYTHON, code, *arguments], timeout=TIMEOUT_S).strip()

"""Readers of the page who ask for nothing, read nothing or come by the dozen: it takes few files, and others read."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weightgrad.event_log import EventLog
from weightgrad.lab.page import page_server
from weightgrad.lab.page.page_server import PageServer, RunWatcher
from weightgrad.runtime.transport.connection_gate import connections

LIMIT_S = 60.0


@pytest.fixture(name="served")
def fixture_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageServer]:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    limits = dataclasses.replace(page_server._LIMITS, per_address=5, handshake_s=0.5, idle_s=0.5)
    monkeypatch.setattr(page_server, "_LIMITS", limits)
    monkeypatch.setattr(page_server, "_STALLED_S", 2.5)
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write("site_joined", 0.5, site="east", version=0)
    found = page_server.serve("127.0.0.1:0", tmp_path)
    yield found
    found.stop()


def until_ended(one: socket.socket) -> None:
    """Read until the server has ended the connection."""
    one.settimeout(LIMIT_S)
    try:
        while one.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass


def test_connections_that_ask_for_nothing_are_ended_and_readers_are_not(served: PageServer) -> None:
    with urllib.request.urlopen(served.url + "events", timeout=LIMIT_S) as reader:
        assert json.loads(reader.readline().removeprefix(b"data: "))["status"] == "running"
        idle = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(20)]
        idle[0].sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        for one in idle:
            until_ended(one)
            one.close()
        assert len(connections(served.port)) <= 5
        for _ in range(3):
            assert reader.readline()


def test_a_reader_that_does_not_read_is_ended(served: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()

    def large(watcher: RunWatcher) -> dict[str, Any]:
        del watcher
        return {"number": next(numbers), "text": "x" * (8 << 20)}

    monkeypatch.setattr(RunWatcher, "view", large)
    with socket.create_connection(("127.0.0.1", served.port)) as slow:
        slow.sendall(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        until = time.monotonic() + LIMIT_S
        while not connections(served.port):
            assert time.monotonic() < until
            time.sleep(0.01)
        while connections(served.port):
            assert time.monotonic() < until, "it holds a connection for ever"
            time.sleep(0.1)


def test_only_so_many_are_told_of_changes(served: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "_MOST_STREAMS", 2)
    with (
        urllib.request.urlopen(served.url + "events", timeout=LIMIT_S) as one,
        urllib.request.urlopen(served.url + "events", timeout=LIMIT_S) as two,
    ):
        assert one.readline()
        assert two.readline()
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(served.url + "events", timeout=LIMIT_S)
        with urllib.request.urlopen(served.url + "data.json", timeout=LIMIT_S) as data:
            assert json.loads(data.read())["status"] == "running"

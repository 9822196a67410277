"""A site that opens more calls than the server has threads for, or keeps them open: nobody else notices."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import grpc
import pytest

from weightgrad.errors import CredentialsError, WeightGradError
from weightgrad.runtime.rate_limiter import RateLimiter
from weightgrad.runtime.transport import grpc_questions, grpc_server
from weightgrad.runtime.transport.channels import ASK, ENTER, MEASURE
from weightgrad.runtime.transport.grpc_sessions import TransportLimits
from weightgrad.runtime.transport.grpc_settings import CALLS_PER_CONNECTION

from .grpc_harness import place, site
from .harness import LIMA, OSLO, TIMEOUT_S, receive, until


def test_the_server_outlives_a_time_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in gRPC's own thread would end it, and with it the server for everybody."""
    start, none_left = threading.Thread.start, threading.Event()

    def start_if_there_is_one(thread: threading.Thread) -> None:
        if none_left.is_set() and thread.name == "grpc-call":
            raise RuntimeError("can't start new thread")
        start(thread)

    with place() as hub, site(hub.address, here=True) as oslo:
        until(lambda: hub.server.sessions()[OSLO].streams == 5)
        monkeypatch.setattr(threading.Thread, "start", start_if_there_is_one)
        none_left.set()
        with site(hub.address, "lima", here=True, start=False) as lima:
            entering = threading.Thread(target=lambda: lima.enter(b"lima", TIMEOUT_S))
            entering.start()
            time.sleep(0.5)
            oslo.send(b"still there")
            until(lambda: hub.got[OSLO] == [b"still there"])
            assert hub.server.send(OSLO, b"yes")
            assert receive(oslo) == b"yes"
            none_left.clear()
            entering.join(TIMEOUT_S)
            lima.start()
            lima.send(b"here")
            until(lambda: hub.got[LIMA] == [b"here"])


def test_a_site_has_only_so_many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has threads at the server, and a site may have many ranks."""
    monkeypatch.setattr(grpc_server, "MAX_STREAMS", 4)
    with place(limits=TransportLimits(streams_per_rank=1)) as hub, site(hub.address, here=True):
        until(lambda: hub.server.sessions()[OSLO].streams == 5)
        with site(hub.address, here=True, rank=1, start=False) as second:
            second.enter(b"", TIMEOUT_S)
            second.start()
            with pytest.raises(WeightGradError, match="streams of 2 ranks open; at most 6 may be"):
                receive(second)
            assert sum(one.streams for one in hub.server.sessions().values()) <= 6
        with site(hub.address, "lima", here=True) as lima:
            lima.send(b"here")
            until(lambda: hub.got[LIMA] == [b"here"])


class _Anybody:
    """Answers every question."""

    def check_caller(self, caller: Any) -> None:
        del caller

    def answer(self, caller: Any, request: bytes) -> bytes:
        del caller
        return request


@pytest.mark.parametrize("first", [b"", json.dumps({"up": 0.1}).encode()], ids=["silent", "begun"])
def test_a_measurement_that_never_ends_takes_nobody_s_place(monkeypatch: pytest.MonkeyPatch, first: bytes) -> None:
    monkeypatch.setattr(grpc_questions, "_LASTS_S", 1.0)
    monkeypatch.setattr(grpc_questions, "_MEASURED_PER_S", 1e6)
    silent = threading.Event()

    def requests() -> Any:
        if first:
            yield first
        silent.wait(TIMEOUT_S)

    with place() as hub, grpc.insecure_channel(hub.address) as channel:
        hub.server.answer_with(_Anybody())
        measure = channel.stream_stream(MEASURE)
        calls = [measure(requests()) for _ in range(grpc_questions._OWN_STREAMS)]
        for call in calls:
            with pytest.raises(grpc.RpcError) as ended:
                list(call)
            assert ended.value.code() is grpc.StatusCode.CANCELLED
        silent.set()
        assert list(measure(iter([json.dumps({"down": 0.1}).encode()])))


@pytest.mark.parametrize(
    "first",
    [b"[" * 100_000, b'{"down": ' + b"[" * 50_000, b'{"down": 1' + b"0" * 400 + b"}", b'{"up": ' + b"1" * 5000 + b"}"],
    ids=["deep", "deeper", "large", "long"],
)
def test_a_measurement_that_cannot_be_read_is_no_error_of_the_server(first: bytes) -> None:
    with place() as hub, grpc.insecure_channel(hub.address) as channel:
        hub.server.answer_with(_Anybody())
        with pytest.raises(grpc.RpcError, match="a measurement that cannot be read") as ended:
            list(channel.stream_stream(MEASURE)(iter([first])))
        assert ended.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_calls_whose_requests_never_come_take_few_threads() -> None:
    """Each has a thread as soon as it begins, and a site may have hundreds of connections."""

    def waiting() -> int:
        return sum(thread.name == "grpc-call" for thread in threading.enumerate())

    with place() as hub, site(hub.address, here=True) as oslo:
        until(lambda: hub.server.sessions()[OSLO].streams == 5)
        until(lambda: waiting() == 5)
        with socket.create_connection(("127.0.0.1", hub.server.port)) as stranger:
            stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0))
            for number in range(5 * CALLS_PER_CONNECTION):
                stranger.sendall(frame(1, 4, 1 + 2 * number, b"\x83\x86" + CALL))
            until(lambda: waiting() > 5)
            oslo.send(b"still there")
            until(lambda: hub.got[OSLO] == [b"still there"])
            time.sleep(0.5)
            assert 5 < waiting() <= 5 + CALLS_PER_CONNECTION


def text(value: bytes) -> bytes:
    """A short text in HPACK."""
    return bytes([len(value)]) + value


CALL = b"\x04" + text(ENTER.encode()) + b"\x01" + text(b"localhost")
CALL += b"\0" + text(b"content-type") + text(b"application/grpc") + b"\0" + text(b"te") + text(b"trailers")
"""The path, host and headers of a call of gRPC."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def test_questions_that_are_not_answered_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    class Nobody(_Anybody):
        def check_caller(self, caller: Any) -> None:
            raise CredentialsError("the certificate is revoked")

    caplog.set_level("INFO")
    with place() as hub, grpc.insecure_channel(hub.address) as channel:
        hub.server.answer_with(Nobody())
        hub.server._questions._lines = RateLimiter(per_s=1e-9, burst=3)
        for _ in range(10):
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(ASK)(b"{}")
    assert 1 <= caplog.text.count("was not answered") <= 3

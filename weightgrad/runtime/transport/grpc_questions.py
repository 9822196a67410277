"""Questions to a global server from outside any session: what an operator wants done, and what a site wants to know.

    Ask      unary         JSON each way; who may ask what is decided by the `Responder`
    Measure  both ways     bytes for a few seconds, one way, to see how fast the line is

Both come over the port of the sites and with mutual TLS. A caller is known by its certificate; without TLS, which only
a loopback address may be, everybody on the machine may ask.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

import grpc

from weightgrad.errors import LinkError, ProtocolError, RefusedError, WeightGradError
from weightgrad.runtime.rate_limiter import RateLimiter
from weightgrad.runtime.security.credentials import common_name
from weightgrad.runtime.transport.peer_certificate import certificate_of

log = logging.getLogger("weightgrad.serve")

MOST_SECONDS = 10.0
"""A measurement lasts at most so long."""
CHUNK_BYTES = 256 << 10
_LASTS_S = 60.0  # a call of Measure, however slowly its caller sends or reads
_MOST_STREAMS = 8  # that measure at the same time, of all callers together
_OWN_STREAMS = 5  # of these, of one caller: `doctor` measures with four
_MOST_REQUEST = 64 << 10
_ASKED_PER_S = 5.0  # by one caller
_MEASURED_PER_S = 0.05  # streams of one caller: a site must not fill the server's line


class Caller(NamedTuple):
    """Who asks: what its certificate proves, and where it connects from. Without TLS there is no name."""

    name: str | None
    serial: int | None
    expires: datetime | None
    address: str


class Responder(Protocol):
    """What answers. Called from threads of the transport."""

    def check_caller(self, caller: Caller) -> None:
        """Raise a WeightGradError unless this caller may ask at all."""

    def answer(self, caller: Caller, request: bytes) -> bytes:
        """Answer, or raise a WeightGradError whose text the caller is shown."""


class Questions:
    """The two calls of a gRPC server.

    Args:
        prove: called with a caller that may ask, so that its connection is not taken for a stranger's.
        end: ends a call with the status of an error, by an exception.
    """

    def __init__(self, prove: Callable[[Caller], None], end: Callable[[WeightGradError, Any], None]) -> None:
        self.responder: Responder | None = None
        self._prove, self._end = prove, end
        self._asked = RateLimiter(per_s=_ASKED_PER_S, burst=100)
        self._lines = RateLimiter(per_s=1.0, burst=20)  # about callers at one address that are not answered
        self._measured = RateLimiter(per_s=_MEASURED_PER_S, burst=64)
        self._measuring = threading.BoundedSemaphore(_MOST_STREAMS)
        self._own: Counter[str | None] = Counter()
        self._lock = threading.Lock()

    def handle_ask(self, request: bytes, context: Any) -> bytes:
        """The call Ask."""
        try:
            responder, caller = self._caller(context)
            if not self._asked.try_take(caller.name):
                raise RefusedError(f"{caller.name} asks more often than {_ASKED_PER_S:g} times a second; wait a little")
            if len(request) > _MOST_REQUEST:
                raise ProtocolError(f"a question of {len(request)} bytes; wanted at most {_MOST_REQUEST}")
            return responder.answer(caller, request)
        except WeightGradError as error:
            if self._lines.try_take(unquote(context.peer()).rpartition(":")[0]):
                log.info("a question of %s was not answered: %s", context.peer(), error)
            self._end(error, context)
        except Exception as error:
            log.exception("answering %s failed", context.peer())
            self._end(LinkError(f"the global server failed ({error!r}); see its log"), context)
        raise AssertionError("ending a call raises")

    def handle_measure(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """The call Measure: the first record says {"down": seconds} or {"up": seconds}."""
        try:
            _, caller = self._caller(context)
            if not self._measured.try_take(caller.name):
                raise LinkError(f"{caller.name} has measured the line often; try again in a few minutes")
            self._begin(caller.name)
        except WeightGradError as error:
            self._end(error, context)
        deadline = threading.Timer(_LASTS_S, context.cancel)  # a silent caller would keep its place for ever
        deadline.daemon = True
        deadline.start()
        try:
            yield from _measure(requests)
        except ProtocolError as error:
            self._end(error, context)
        finally:
            deadline.cancel()
            with self._lock:
                self._own[caller.name] -= 1
            self._measuring.release()

    def _begin(self, name: str | None) -> None:
        """Take a place among those who measure, of which one caller has not all."""
        with self._lock:
            if self._own[name] >= _OWN_STREAMS or not self._measuring.acquire(blocking=False):
                raise LinkError("the line is being measured already; try again in a few seconds")
            self._own[name] += 1

    def _caller(self, context: Any) -> tuple[Responder, Caller]:
        caller, responder = caller_of(context), self.responder
        if responder is None:
            raise LinkError("this process of the server answers no questions; ask the first one, or a little later")
        responder.check_caller(caller)
        self._prove(caller)
        return responder, caller


def _measure(requests: Iterator[bytes]) -> Iterator[bytes]:
    try:
        wanted = json.loads(next(requests, b"{}"))
        (way, seconds), *more = wanted.items()
        seconds = float(seconds)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError, grpc.RpcError) as error:
        raise ProtocolError(f"a measurement that cannot be read ({error!r})") from None
    if way not in ("up", "down") or more or not 0 < seconds <= MOST_SECONDS:
        raise ProtocolError(f"a measurement of {wanted!r}; wanted up or down, and at most {MOST_SECONDS:g} s")
    until = time.monotonic() + seconds
    if way == "down":
        chunk = os.urandom(CHUNK_BYTES)
        while time.monotonic() < until:
            yield chunk
        return
    received, began = 0, None
    try:
        for record in requests:
            began = time.monotonic() if began is None else began
            received += len(record)
            if time.monotonic() > until + MOST_SECONDS:
                break
    except grpc.RpcError:
        return  # the caller is gone
    lasted = 0.0 if began is None else time.monotonic() - began
    yield json.dumps({"bytes": received, "seconds": lasted}).encode()


def caller_of(context: Any) -> Caller:
    """Who calls.

    Raises:
        CredentialsError: the certificate cannot be read, or does not have one name.
    """
    address, certificate = unquote(context.peer()), certificate_of(context)
    if certificate is None:
        return Caller(None, None, None, address)
    return Caller(common_name(certificate), certificate.serial_number, certificate.not_valid_after_utc, address)

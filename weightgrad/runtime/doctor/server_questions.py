"""Asks a global server from outside any session, and measures how fast the line to it is.

gRPC runs in this process, which must not be forked while a question is open; commands ask, training does not.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc

from weightgrad.errors import CredentialsError, LinkError, ProtocolError, RefusedError
from weightgrad.runtime.doctor.server_checks import Speed
from weightgrad.runtime.security.credentials import Credentials
from weightgrad.runtime.security.tls_check import diagnose, is_loopback
from weightgrad.runtime.transport.channels import ASK, MEASURE
from weightgrad.runtime.transport.grpc_questions import CHUNK_BYTES
from weightgrad.runtime.transport.grpc_settings import channel_options

_REFUSALS = {
    grpc.StatusCode.PERMISSION_DENIED: RefusedError,
    grpc.StatusCode.UNAUTHENTICATED: CredentialsError,
    grpc.StatusCode.FAILED_PRECONDITION: ProtocolError,
}


class BusyError(LinkError):
    """The server measures with others just now."""


class ServerQuestions:
    """Channels to a global server for questions; to be closed, or used in a `with`.

    Args:
        address: HOST:PORT.
        credentials: whose certificates are shown; None: none, for a server on this machine only.
        streams: over how many connections the speed is measured; training uses four.

    Raises:
        CredentialsError: there are no certificates, and the server is on another machine.
    """

    def __init__(self, address: str, credentials: Credentials | None, *, streams: int = 4) -> None:
        if credentials is None and not is_loopback(address):
            raise CredentialsError(f"certificates are needed to ask {address}; give --credentials DIR")
        self.address, self._credentials = address, credentials
        options = channel_options(streams=streams)
        self._channels = [
            grpc.insecure_channel(address, own)
            if credentials is None
            else grpc.secure_channel(address, credentials.for_client(), own)
            for own in options
        ]

    def __enter__(self) -> ServerQuestions:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels:
            channel.close()

    def ask(self, what: str, *, timeout: float = 70.0, **more: Any) -> dict[str, Any]:
        """Ask, and return the answer.

        Args:
            what: the question.
            timeout: seconds to wait.
            more: what belongs to it.

        Raises:
            RefusedError: the server does not want to.
            CredentialsError: the certificate is not one that may ask this, or is not accepted.
            ProtocolError: the server is of another release.
            LinkError: the server cannot be reached.
        """
        request = json.dumps({"ask": what, **{name: value for name, value in more.items() if value is not None}})
        try:
            reply = self._channels[0].unary_unary(ASK)(request.encode(), timeout=timeout, wait_for_ready=False)
        except grpc.RpcError as error:
            raise self._explain(error) from None
        found = json.loads(reply)
        assert isinstance(found, dict)
        return found

    def measure(self, way: str, seconds: float) -> Speed:
        """How fast bytes go one way, over all connections together.

        Args:
            way: "up" to the server, or "down" from it.
            seconds: how long.

        Raises:
            LinkError, RefusedError, CredentialsError, ProtocolError: as `ask`.
        """
        work = self._send if way == "up" else self._fetch
        found: list[Speed] = []
        failed: list[Exception] = []

        def one(channel: Any) -> None:
            try:
                found.append(work(channel, seconds))
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=one, args=(channel,), daemon=True) for channel in self._channels[1:]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise self._explain(failed[0]) if isinstance(failed[0], grpc.RpcError) else failed[0]
        return Speed(sum(speed.received for speed in found), max(speed.seconds for speed in found))

    def _send(self, channel: Any, seconds: float) -> Speed:
        def records() -> Iterator[bytes]:
            yield json.dumps({"up": seconds}).encode()
            chunk, until = os.urandom(CHUNK_BYTES), time.monotonic() + seconds
            while time.monotonic() < until:
                yield chunk

        replies = list(channel.stream_stream(MEASURE)(records(), timeout=4 * seconds + 20))
        if not replies:
            raise LinkError(f"{self.address} has taken bytes for {seconds:g} s and said nothing of them")
        told = json.loads(replies[0])
        return Speed(int(told["bytes"]), float(told["seconds"]))

    def _fetch(self, channel: Any, seconds: float) -> Speed:
        wanted, received, began, ended = json.dumps({"down": seconds}).encode(), 0, 0.0, 0.0
        for record in channel.stream_stream(MEASURE)(iter([wanted]), timeout=4 * seconds + 20):
            ended = time.monotonic()
            if not began:
                began = ended  # the round trip before the first one is not the line's speed
            else:
                received += len(record)
        return Speed(received, ended - began)

    def _explain(self, error: Any) -> Exception:
        """An error of gRPC in words."""
        code, why = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return ProtocolError(f"{self.address} answers no questions: it is another release, or not a global server")
        if code is grpc.StatusCode.ABORTED:
            return BusyError(why)
        if code in _REFUSALS:
            return _REFUSALS[code](why)
        problem = diagnose(self.address, self._credentials) if code is grpc.StatusCode.UNAVAILABLE else None
        if problem is not None and problem.is_final:
            return CredentialsError(problem.reason)
        return LinkError(problem.reason if problem is not None else f"{self.address} does not answer: {why}")

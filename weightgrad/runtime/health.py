"""A small HTTP server: `/metrics` for Prometheus, `/healthz` for whatever restarts unhealthy processes.

It has neither TLS nor authentication, so it belongs on an address that only your own network reaches. It runs in
threads of its own: `status` is called from them, and a slow reader delays nobody. There are at most `MOST_READERS` at a
time, and none for longer than `READER_S`.
"""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from weightgrad.errors import LinkError
from weightgrad.runtime.metrics import MetricSet

# Every Prometheus reads this version; the library's own constant names one that old releases do not know.
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MOST_READERS = 32
READER_S = 10.0

Status = Callable[[], dict[str, object]]
"""Returns facts about the process; the fact `healthy` decides between 200 and 503."""


class HealthServer:
    """A running server of metrics and health. Made by `serve`."""

    def __init__(self, http: ThreadingHTTPServer) -> None:
        self._http = http
        self.port: int = http.server_address[1]
        self._thread = threading.Thread(target=http.serve_forever, args=(0.1,), name="health", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop; the address is free when this returns. May be called again."""
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


def serve(listen: str, metrics: MetricSet, status: Status) -> HealthServer:
    """Serve metrics and health until `stop`.

    Args:
        listen: HOST:PORT, such as 127.0.0.1:7444 or [::1]:7444; for port 0 the system chooses a port.
        metrics: what /metrics shows.
        status: what /healthz shows.

    Raises:
        LinkError: the address cannot be listened on.
    """
    host, port = _address(listen)
    try:
        return HealthServer(_Http((host, port), _handler(metrics, status)))
    except OSError as error:
        raise LinkError(
            f"metrics and health cannot listen on {listen}: {error.strerror or error}; "
            "stop what listens there, or give another address"
        ) from error


def _address(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    number = int(port) if port.isascii() and port.isdigit() else -1
    if not colon or not host or (":" in host and not bracketed) or not 0 <= number <= 65535:
        raise LinkError(f"metrics and health cannot listen on {listen!r}; write HOST:PORT, such as 127.0.0.1:7444")
    return host[1:-1] if bracketed else host, number


class _Http(ThreadingHTTPServer):
    allow_reuse_port = False  # some Pythons set it: a second server would silently take half of the requests

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._readers: dict[
            int, tuple[float, socket.socket]
        ] = {}  # by number of the socket: until when, and the socket
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a thread for a reader; where there are too many, the oldest one has to go."""
        while len(self._readers) >= MOST_READERS:
            self._end(min(self._readers, key=lambda one: self._readers[one][0]))
        self._readers[request.fileno()] = time.monotonic() + READER_S, request
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Called a few times a second: end those who take too long, and forget those who have gone."""
        for number, (until, request) in list(self._readers.items()):
            if request.fileno() != number:
                self._readers.pop(number)
            elif time.monotonic() > until:
                self._end(number)

    def _end(self, number: int) -> None:
        _, request = self._readers.pop(number)
        with contextlib.suppress(OSError):  # it has gone by itself
            request.shutdown(socket.SHUT_RDWR)

    def server_bind(self) -> None:
        # The method of HTTPServer looks up its own host name, which can take many seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore readers that went away; report everything else."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def _handler(metrics: MetricSet, status: Status) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0  # seconds: a silent reader does not keep its thread

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._reply(HTTPStatus.OK, _METRICS_TYPE, metrics.text())
            elif path == "/healthz":
                code, facts = _health(status)
                self._reply(code, "application/json", json.dumps(facts, default=str).encode() + b"\n")
            else:
                self._reply(HTTPStatus.NOT_FOUND, "text/plain", b"this server has /metrics and /healthz\n")

        def _reply(self, code: HTTPStatus, kind: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def version_string(self) -> str:
            return "weightgrad"

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def _health(status: Status) -> tuple[HTTPStatus, dict[str, object]]:
    try:
        facts = status()
    except Exception as error:  # whatever it is: a process that cannot report its status is not healthy
        facts = {"healthy": False, "error": f"{type(error).__name__}: {error}"}
    return HTTPStatus.OK if facts.get("healthy") else HTTPStatus.SERVICE_UNAVAILABLE, facts

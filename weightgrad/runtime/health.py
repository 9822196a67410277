"""A small page for machines: `/metrics` for Prometheus, `/healthz` for whoever restarts what is ill.

It has no TLS and asks for no name, so it belongs on an address that only your own network reaches.
It runs in threads of its own: `status` is called from them, and a slow reader holds up nobody.
"""

from __future__ import annotations

import json
import socket
import socketserver
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from weightgrad.errors import LinkError
from weightgrad.runtime.metrics import Metrics

# What every Prometheus reads; the library's own constant names a newer version that old ones do not know.
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Status = Callable[[], dict[str, object]]
"""Facts about the process; `healthy` among them decides between 200 and 503."""


class HealthServer:
    """The page, while it is served."""

    def __init__(self, http: ThreadingHTTPServer) -> None:
        self._http = http
        self.port: int = http.server_address[1]
        self._thread = threading.Thread(target=http.serve_forever, args=(0.1,), name="health", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close it; the address is free when this returns."""
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


def serve(listen: str, metrics: Metrics, status: Status) -> HealthServer:
    """Serve on HOST:PORT, such as 127.0.0.1:7444 or [::1]:7444; port 0 is any free one."""
    host, port = _address(listen)
    try:
        return HealthServer(_Http((host, port), _handler(metrics, status)))
    except OSError as error:
        raise LinkError(
            f"metrics and health cannot listen on {listen}: {error.strerror or error}; "
            "end what listens there, or give another address"
        ) from error


def _address(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    number = int(port) if port.isascii() and port.isdigit() else -1
    if not colon or not host or (":" in host and not bracketed) or not 0 <= number <= 65535:
        raise LinkError(f"metrics and health cannot listen on {listen!r}; write HOST:PORT, such as 127.0.0.1:7444")
    return host[1:-1] if bracketed else host, number


class _Http(ThreadingHTTPServer):
    allow_reuse_port = False  # some Pythons have it on: a second server would take half of the requests in silence

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # HTTPServer's own asks the name service who it is, which can take many seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away is no news; anything else is."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def _handler(metrics: Metrics, status: Status) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0  # seconds: nobody keeps a thread by saying nothing

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(HTTPStatus.OK, _METRICS_TYPE, metrics.text())
            elif path == "/healthz":
                code, facts = _health(status)
                self._answer(code, "application/json", json.dumps(facts, default=str).encode() + b"\n")
            else:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"here are /metrics and /healthz\n")

        def _answer(self, code: HTTPStatus, kind: str, body: bytes) -> None:
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
    except Exception as error:  # whatever it is: a process that cannot say how it is is not well
        facts = {"healthy": False, "error": f"{type(error).__name__}: {error}"}
    return HTTPStatus.OK if facts.get("healthy") else HTTPStatus.SERVICE_UNAVAILABLE, facts

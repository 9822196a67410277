"""Serves the live page: one HTML file, its data as JSON, and changes as server-sent events. Nothing can be changed.

On loopback anybody on this machine may read it. Elsewhere a token is asked for, as `?token=` or as a bearer token. On
loopback the name in the request must be a loopback name too: a web page elsewhere that resolves its own name to
127.0.0.1 (DNS rebinding) gets nothing.

The page may be served by the process of the global server, whose files it must not use up: a connection that asks for
nothing is ended after ten seconds, one whose reader does not read after a minute or two, and `_MOST_STREAMS` readers
are told of changes at a time.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from weightgrad.errors import LinkError, RunError, WeightGradError
from weightgrad.lab.page.run_reader import RunReader
from weightgrad.lab.page.run_state import RunState
from weightgrad.lab.page.run_view import run_view
from weightgrad.runtime.security import credentials
from weightgrad.runtime.security.tls_check import is_loopback
from weightgrad.runtime.transport.connection_gate import ConnectionGate, GateLimits
from weightgrad.runtime.transport.socket_bytes import endpoint

_HERE = Path(__file__).parent
_SECONDS = 1.0  # between two looks at the logs
_MOST_STREAMS = 32
_STALLED_S = 30.0  # without a change taken, after which a reader does not count as one
_LIMITS = GateLimits(per_address=64, in_all=128, idle_per_site=64, idle_s=60.0)
_POLICY = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'"
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_COOKIE = "weightgrad-page"


class RunWatcher:
    """The present data of a run, read again when it is asked for and a second has passed."""

    def __init__(self, directory: Path, *, certificates: Path | None = None) -> None:
        self.directory = directory
        self._certificates = certificates or directory / "certs"
        self._reader = RunReader(directory)
        self._lock = threading.Lock()
        self._state = self._new_state()
        self._looked = 0.0
        self._view: dict[str, Any] = {}

    def _new_state(self) -> RunState:
        path = self.directory / "recipe.yaml"
        recipe: Any = {}
        if path.exists():
            try:
                recipe = _plain(path)
            except (OSError, yaml.YAMLError, WeightGradError):
                recipe = {}
        return RunState(recipe if isinstance(recipe, dict) else {}, self.directory.name)

    def view(self) -> dict[str, Any]:
        """The page's data."""
        with self._lock:
            now = time.monotonic()
            if self._view and now - self._looked < _SECONDS / 2:
                return self._view
            if self._reader.restarted() or (not self._state.recipe and (self.directory / "recipe.yaml").exists()):
                self._reader, self._state = RunReader(self.directory), self._new_state()
            for source, event in self._reader.new_events():
                self._state.add(source, event)
            self._view = {**run_view(self._state), "certificates": certificate_days(self._certificates)}
            self._looked = now
            return self._view


def _plain(path: Path) -> dict[str, Any]:
    """A recipe, or a list of sites, with its quantities as numbers."""
    from weightgrad.lab.recipes.site_list import load_served

    return load_served(path).dump()


def certificate_days(directory: Path) -> list[dict[str, Any]]:
    """The certificates of a directory of `weightgrad certs`, and the days until each expires."""
    paths = {"CA": directory / "ca.pem", "global server": directory / "server" / "cert.pem"}
    paths |= {path.parent.name: path for path in sorted((directory / "sites").glob("*/cert.pem"))}
    if (directory / "cert.pem").exists():
        paths["this machine"] = directory / "cert.pem"
    found, now = [], datetime.now(timezone.utc)
    for who, path in paths.items():
        try:
            left = credentials.expires_of(path.read_bytes()) - now
        except (OSError, ValueError, WeightGradError):
            continue
        found.append({"who": who, "days": left.days})
    return found


class Readers:
    """The connections of those who may read the page, and which of them are told of changes.

    Args:
        port: where the page is served.
    """

    def __init__(self, port: int) -> None:
        self._streams: dict[str, float] = {}  # by endpoint, when the reader last took something
        self.gate = ConnectionGate(port, _LIMITS, lambda reason: None, self._told)

    def _told(self) -> list[str]:
        now = time.monotonic()
        return [peer for peer, at in list(self._streams.items()) if now - at < _STALLED_S]

    def asks(self, peer: str) -> None:
        """Somebody who may read has asked for something."""
        self.gate.prove(peer, "a reader")

    def begins(self, peer: str) -> bool:
        """A reader wants to be told of changes; False if there are too many."""
        told = set(self._told())
        self._streams = {one: at for one, at in self._streams.items() if one in told}
        if len(self._streams) >= _MOST_STREAMS and peer not in self._streams:
            return False
        self.takes(peer)
        return True

    def takes(self, peer: str) -> None:
        """A reader has taken what it was sent."""
        self._streams[peer] = time.monotonic()

    def ends(self, peer: str) -> None:
        """A reader has gone."""
        self._streams.pop(peer, None)


class PageServer:
    """A running page. Made by `serve`."""

    def __init__(
        self, server: Any, listener: socket.socket, host: str, token: str | None, gate: ConnectionGate
    ) -> None:
        self._gate = gate
        self._server, self._listener = server, listener
        self.port: int = listener.getsockname()[1]
        host = socket.gethostname() if host in ("0.0.0.0", "::") else host  # what another machine can open
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.port}/" + (f"?token={token}" if token is not None else "")
        self._thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="page", daemon=True)
        self._thread.start()
        gate.start()

    def stop(self) -> None:
        """Stop; open pages are told no more. May be called again."""
        self._gate.stop()
        self._server.should_exit = True
        self._thread.join(timeout=10.0)
        self._listener.close()

    def wait(self) -> None:
        """Serve until the process is interrupted."""
        while self._thread.is_alive():
            self._thread.join(timeout=0.5)


def serve(listen: str, directory: Path, *, token: str | None = None, certificates: Path | None = None) -> PageServer:
    """Serve the page of a run until `stop`.

    Args:
        listen: HOST:PORT, such as 127.0.0.1:7445; for port 0 the system chooses a port.
        directory: of the run, which need not be there yet.
        token: what a reader must give; None makes one where the address is not loopback, and needs none where it is.
        certificates: the directory of `weightgrad certs`; None: `certs` of the run.

    Raises:
        RunError: starlette or uvicorn is not installed.
        LinkError: the address cannot be listened on.
    """
    try:
        import uvicorn
    except ImportError:
        raise RunError("the page needs starlette and uvicorn; run: pip install 'weightgrad[page]'") from None
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise LinkError(f"the page cannot listen on {listen!r}; write HOST:PORT, such as 127.0.0.1:7445")
    host = host.strip("[]")
    local = is_loopback(f"{host}:{port}")
    if token is None and not local:
        token = secrets.token_urlsafe(16)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise LinkError(
            f"the page cannot listen on {listen}: {error.strerror or error}; stop what listens there, or give another "
            "address"
        ) from error
    readers = Readers(listener.getsockname()[1])
    app = application(RunWatcher(directory, certificates=certificates), readers, token=token, local=local)
    config = uvicorn.Config(
        app, log_level="error", access_log=False, lifespan="off", ws="none", server_header=False,
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    return PageServer(uvicorn.Server(config), listener, host, token, readers.gate)


def application(watcher: RunWatcher, readers: Readers, *, token: str | None, local: bool) -> Any:
    """The ASGI application.

    Args:
        watcher: what is shown.
        readers: who is shown it.
        token: what a reader must give; None: nothing.
        local: whether it listens on loopback only.
    """
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    def peer_of(request: Request) -> str:
        return "" if request.client is None else endpoint(request.client.host, request.client.port)

    def refuse(request: Request) -> Response | None:
        name = request.url.hostname or ""
        if local and not is_loopback(f"[{name}]:1" if ":" in name else f"{name}:1"):
            return Response("this page is for this machine only\n", 403, _HEADERS)
        if token is None:
            readers.asks(peer_of(request))
            return None
        header = request.headers.get("authorization", "").removeprefix("Bearer ")
        for given in (request.query_params.get("token"), header, request.cookies.get(_COOKIE)):
            if given is not None and hmac.compare_digest(given.encode(), token.encode()):
                readers.asks(peer_of(request))
                return None
        return Response("this page needs its token: add ?token=..., as the command printed it\n", 401, _HEADERS)

    def file(name: str, kind: str) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            if (refused := refuse(request)) is not None:
                return refused
            found = Response((_HERE / name).read_bytes(), 200, _HEADERS, media_type=kind)
            if token is not None:
                found.set_cookie(_COOKIE, token, httponly=True, samesite="strict")
            return found

        return answer

    async def data(request: Request) -> Response:
        if (refused := refuse(request)) is not None:
            return refused
        view = await asyncio.to_thread(watcher.view)
        return Response(_json(view), 200, _HEADERS, media_type="application/json")

    async def events(request: Request) -> Response:
        if (refused := refuse(request)) is not None:
            return refused

        peer = peer_of(request)
        if not readers.begins(peer):
            return Response(f"{_MOST_STREAMS} readers are told of changes already\n", 503, _HEADERS)

        async def stream() -> AsyncIterator[bytes]:
            last = b""
            try:
                while not await request.is_disconnected():
                    text = _json(await asyncio.to_thread(watcher.view))
                    yield b": nothing new\n\n" if text == last else b"data: " + text + b"\n\n"
                    readers.takes(peer)
                    last = text
                    await asyncio.sleep(_SECONDS)
            finally:
                readers.ends(peer)

        return StreamingResponse(stream(), 200, _HEADERS, media_type="text/event-stream")

    return Starlette(
        routes=[
            Route("/", file("page.html", "text/html"), methods=["GET"]),
            Route("/page.css", file("page.css", "text/css"), methods=["GET"]),
            Route("/page.js", file("page.js", "text/javascript"), methods=["GET"]),
            Route("/data.json", data, methods=["GET"]),
            Route("/events", events, methods=["GET"]),
        ]
    )


def _json(view: dict[str, Any]) -> bytes:
    return json.dumps(view, separators=(",", ":"), allow_nan=False, default=str).encode()

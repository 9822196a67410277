"""A gRPC server that listens, with the settings of this transport."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc

from weightgrad.errors import LinkError
from weightgrad.runtime.transport.channels import SERVICE, Options
from weightgrad.runtime.transport.connection_gate import raise_file_limit
from weightgrad.runtime.transport.grpc_settings import CALLS_PER_CONNECTION, Keepalive, common_options

log = logging.getLogger("weightgrad.serve")

_RETRY_S = 0.05
_SAY_S = 10.0  # between two lines in the log


def make_server(
    listen: str,
    credentials: grpc.ServerCredentials | None,
    keepalive: Keepalive,
    handshake_s: float,
    handlers: dict[str, Any],
) -> tuple[Any, int]:
    """Return a gRPC server that listens, and its port; for port 0 the system chooses one.

    Args:
        listen: HOST:PORT.
        credentials: the server's certificates; None listens without TLS.
        keepalive: how a connection that falls silent is noticed.
        handshake_s: seconds that a handshake may take.
        handlers: what answers, by method.
    """
    options: Options = [
        *common_options(keepalive),
        # Two servers on one port would each receive some of the streams.
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", CALLS_PER_CONNECTION),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 250),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server_handshake_timeout_ms", int(1000 * handshake_s)),
        ("grpc.max_allowed_incoming_connections", _most_connections()),
    ]
    server = grpc.server(DaemonThreads(), options=options)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    try:
        port = server.add_secure_port(listen, credentials) if credentials else server.add_insecure_port(listen)
    except RuntimeError:
        raise LinkError(f"cannot listen on {listen}; is another server there, or another machine's address?") from None
    return server, int(port)


def _most_connections() -> int:
    """Half of the files that this process may open: the rest is for its state."""
    return max(64, min(raise_file_limit() // 2, 1 << 20))


class DaemonThreads(futures.Executor):
    """Runs each call in a daemon thread: calls last as long as streams, and must not keep the interpreter alive.

    An error here would end the only thread in which gRPC hears of anything, and with it the server for everybody. So
    where the system gives no thread, the call waits for one; its caller may have given up when it comes.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._called = threading.Event()
        self._said = 0.0
        threading.Thread(target=self._start_waiting, name="grpc-waiting-calls", daemon=True).start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        """Begin a call, now or as soon as there is a thread for it."""
        future: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        if self._waiting or not _started(run):
            self._waiting.append(run)
            self._called.set()
            if time.monotonic() - self._said >= _SAY_S:
                self._said = time.monotonic()
                log.error(
                    "the system gives this process no more threads: new calls wait; raise its limit of tasks (ulimit "
                    "-u, TasksMax, pids.max)"
                )
        return future

    def _start_waiting(self) -> None:
        while True:
            self._called.wait()
            self._called.clear()
            while self._waiting:
                if _started(self._waiting[0]):
                    self._waiting.popleft()
                else:
                    time.sleep(_RETRY_S)


def _started(run: Callable[[], None]) -> bool:
    """Whether there was a thread for it."""
    try:
        threading.Thread(target=run, name="grpc-call", daemon=True).start()
    except RuntimeError:
        return False
    return True

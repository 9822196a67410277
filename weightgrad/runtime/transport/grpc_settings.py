"""What both ends of the gRPC transport agree on: the service, its metadata keys, and the settings of gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc

from weightgrad.errors import LinkError, SpecError
from weightgrad.runtime.transport.records import DEFAULT_CHUNKING

# The names below are part of the protocol and stay as they are, whatever the code is called.
SERVICE = "weightgrad.Transport"
ENTER = f"/{SERVICE}/Enter"
STREAM = f"/{SERVICE}/Stream"

SITE_KEY = "wg-site"
INCARNATION_KEY = "wg-incarnation"
PROTOCOL_KEY = "wg-protocol"
SESSION_KEY = "wg-session"
STREAM_KEY = "wg-stream"

MAX_STREAMS = 64
# A chunk and its header; also the longest request or reply of Enter.
MAX_RECORD_BYTES = DEFAULT_CHUNKING.chunk_bytes + 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Keepalive:
    """How a connection that falls silent is noticed.

    Attributes:
        every_s: seconds between two pings.
        timeout_s: seconds to wait for the reply to a ping before the connection counts as dead. It must exceed the
            longest round trip, queues included, or a busy link is taken for a dead one.
    """

    every_s: float = 2.0
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        for field in ("every_s", "timeout_s"):
            if not 0.5 <= getattr(self, field) <= 600:
                raise SpecError(f"Keepalive.{field} is {getattr(self, field)!r}; it must be 0.5 to 600 seconds")


Options = list[tuple[str, int | str]]


def make_server(
    listen: str, credentials: grpc.ServerCredentials | None, keepalive: Keepalive, handlers: dict[str, Any]
) -> tuple[Any, int]:
    """Return a gRPC server that listens, and its port; for port 0 the system chooses one."""
    options: Options = [
        *_options(keepalive),
        # Two servers on one port would each receive some of the streams.
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 250),
        ("grpc.http2.max_ping_strikes", 0),
    ]
    server = grpc.server(_DaemonThreads(), options=options)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    try:
        port = server.add_secure_port(listen, credentials) if credentials else server.add_insecure_port(listen)
    except RuntimeError:
        raise LinkError(f"cannot listen on {listen}; is another server there, or another machine's address?") from None
    return server, int(port)


def make_channel(
    address: str,
    credentials: grpc.ChannelCredentials | None,
    keepalive: Keepalive,
    stream: int,
    server_name_override: str | None,
) -> Any:
    """Return one of a site's channels; each has a connection of its own."""
    options: Options = [
        *_options(keepalive),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.channel_id", stream),
        ("grpc.initial_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # Streams are resumed by MessageStream; gRPC would keep copies of the data to do the same.
        ("grpc.enable_retries", 0),
        # Behaviour must not depend on environment variables.
        ("grpc.enable_http_proxy", 0),
    ]
    if server_name_override is not None:
        options.append(("grpc.ssl_target_name_override", server_name_override))
    if credentials is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, credentials, options)


def _options(keepalive: Keepalive) -> Options:
    return [
        ("grpc.max_send_message_length", MAX_RECORD_BYTES),
        ("grpc.max_receive_message_length", MAX_RECORD_BYTES),
        ("grpc.keepalive_time_ms", int(keepalive.every_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive.timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


class _DaemonThreads(futures.Executor):
    """Runs each call in a daemon thread: calls last as long as streams, and must not keep the interpreter alive."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="grpc-call", daemon=True).start()
        return future

"""What both ends of the lanes agree on: the names of the service and of its metadata, and gRPC's settings."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc

from weightgrad.errors import LinkError, SpecError
from weightgrad.runtime.chunks import DEFAULT_CUT

PROTOCOL = "3"
SERVICE = "weightgrad.Field"
ENTER = f"/{SERVICE}/Enter"
LANE = f"/{SERVICE}/Lane"

SITE_KEY = "wg-site"
INCARNATION_KEY = "wg-incarnation"
PROTOCOL_KEY = "wg-protocol"
SESSION_KEY = "wg-session"
LANE_KEY = "wg-lane"

MAX_LANES = 64
# A chunk and its header; also the most that Enter's request or answer may have.
MAX_RECORD_BYTES = DEFAULT_CUT.length + 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Keepalive:
    """How a silent cut is noticed: a ping `every_s`, and the connection is dead without an answer in `timeout_s`.

    The timeout must exceed the longest round trip, queues included, or a busy link is taken for dead.
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
    """A gRPC server that listens, and its port, which the system chooses for port 0."""
    options: Options = [
        *_options(keepalive),
        # Two servers on one port would each get some of the lanes.
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", MAX_LANES),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 250),
        ("grpc.http2.max_ping_strikes", 0),
    ]
    server = grpc.server(_DaemonThreads(), options=options)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    try:
        port = server.add_secure_port(listen, credentials) if credentials else server.add_insecure_port(listen)
    except RuntimeError:
        raise LinkError(f"cannot listen on {listen}; is another server there, or is the address not ours?") from None
    return server, int(port)


def make_channel(
    address: str,
    credentials: grpc.ChannelCredentials | None,
    keepalive: Keepalive,
    lane: int,
    server_name_override: str | None,
) -> Any:
    """One of a site's channels; each has a connection of its own."""
    options: Options = [
        *_options(keepalive),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.channel_id", lane),
        ("grpc.initial_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # A lane resumes by itself; gRPC would keep copies in order to do the same.
        ("grpc.enable_retries", 0),
        # What the program does must not depend on an environment variable.
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
    """A daemon thread a call: calls last as long as lanes do, and must not keep the interpreter alive."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="lanes-call", daemon=True).start()
        return future

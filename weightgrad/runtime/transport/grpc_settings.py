"""What both ends of the gRPC transport agree on: metadata keys, and the settings of gRPC."""

from __future__ import annotations

from dataclasses import dataclass

from weightgrad.errors import SpecError
from weightgrad.runtime.transport.channels import Options
from weightgrad.runtime.transport.records import DEFAULT_CHUNKING

# The names below are part of the protocol and stay as they are, whatever the code is called.
SITE_KEY = "wg-site"
RANK_KEY = "wg-rank"
INCARNATION_KEY = "wg-incarnation"
PROTOCOL_KEY = "wg-protocol"
SESSION_KEY = "wg-session"
STREAM_KEY = "wg-stream"

MAX_STREAMS = 64  # of bulk messages; control messages have one more
# Each call has a thread at the server as soon as it begins, also one whose request never comes. A connection has one
# stream and sometimes a call beside it, but with a limit of 8 gRPC refused every call of a site that had entered a few
# times on its connections.
CALLS_PER_CONNECTION = 64
# A chunk and its header; also the longest request or reply of Enter.
MAX_RECORD_BYTES = DEFAULT_CHUNKING.most_bytes + 64 * 1024


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


def channel_options(
    *, streams: int = 4, keepalive: Keepalive | None = None, server_name_override: str | None = None
) -> list[Options]:
    """The arguments of a client's channels; each has a connection of its own.

    Args:
        streams: how many TCP connections carry bulk messages; one more carries control messages.
        keepalive: how a connection that falls silent is noticed.
        server_name_override: the name to expect in the server's certificate instead of the host, for tests.

    Raises:
        SpecError: too few streams, or too many.
    """
    if not 1 <= streams <= MAX_STREAMS:
        raise SpecError(f"streams is {streams}; it must be 1 to {MAX_STREAMS}")
    expected: Options = []
    if server_name_override is not None:
        expected.append(("grpc.ssl_target_name_override", server_name_override))
    return [
        [
            *common_options(keepalive or Keepalive()),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.channel_id", stream),
            ("grpc.initial_reconnect_backoff_ms", 500),
            ("grpc.max_reconnect_backoff_ms", 2000),
            # Streams are resumed by MessageStream; gRPC would keep copies of the data to do the same.
            ("grpc.enable_retries", 0),
            # Behaviour must not depend on environment variables.
            ("grpc.enable_http_proxy", 0),
            *expected,
        ]
        for stream in range(1 + streams)
    ]


def common_options(keepalive: Keepalive) -> Options:
    """The arguments that both ends have."""
    return [
        ("grpc.max_send_message_length", MAX_RECORD_BYTES),
        ("grpc.max_receive_message_length", MAX_RECORD_BYTES),
        ("grpc.keepalive_time_ms", int(keepalive.every_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive.timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]

"""The channels of a client, with gRPC in this process.

A process with such channels must not be forked: gRPC's threads are not there in the child, and its fork handlers
abort in it. The process of `connection_main.py` and tests use them; training uses `ProcessChannels`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc

from weightgrad.runtime.transport.channels import ENTER, STREAM, Call, CallError, Channels, Metadata, Options, Status
from weightgrad.runtime.transport.socket_bytes import SocketBytes, host_of
from weightgrad.runtime.transport.transport import Traffic


class GrpcChannels(Channels):
    """Channels of gRPC in this process.

    Args:
        address: the server's HOST:PORT.
        credentials: the site's certificates; None connects without TLS.
        options: the arguments of each channel (`grpc_settings.channel_options`).
    """

    def __init__(
        self, address: str, *, credentials: grpc.ChannelCredentials | None, options: Sequence[Options]
    ) -> None:
        self.address, self.count = address, len(options)
        self._channels = [
            grpc.insecure_channel(address, own)
            if credentials is None
            else grpc.secure_channel(address, credentials, own)
            for own in options
        ]
        self._sockets = SocketBytes(int(address.rsplit(":", 1)[1]), side="client", owner=host_of)

    def ask(self, request: bytes, metadata: Metadata, timeout: float) -> tuple[bytes, Mapping[str, str]]:
        """See `Channels.ask`."""
        try:
            result, call = self._channels[0].unary_unary(ENTER).with_call(request, timeout=timeout, metadata=metadata)
        except grpc.RpcError as error:
            raise CallError(_status(error)) from None
        except ValueError as error:  # the channel was closed meanwhile
            raise CallError(Status("CANCELLED", str(error))) from None
        return bytes(result), {key: value for key, value in call.initial_metadata() if isinstance(value, str)}

    def open(self, number: int, records: Iterator[bytes], metadata: Metadata, last: bytes = b"") -> Call:
        """See `Channels.open`."""
        del last
        return _GrpcCall(self._channels[number].stream_stream(STREAM)(records, metadata=metadata, wait_for_ready=True))

    def socket_bytes(self) -> tuple[Traffic | None, float]:
        """See `Channels.socket_bytes`."""
        return self._sockets.total(), self._sockets.round_trip_s

    def close(self) -> None:
        """See `Channels.close`."""
        for channel in self._channels:
            channel.close()


class _GrpcCall(Call):
    def __init__(self, call: Any) -> None:
        self._call = call

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._call
        except grpc.RpcError:
            return  # `status` says why

    def status(self) -> Status:
        return _status(self._call)

    def cancel(self) -> None:
        self._call.cancel()


def _status(call: Any) -> Status:
    return Status(call.code().name, call.details() or "")

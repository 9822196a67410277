"""The channels of a client, with gRPC in another process, so that this one can be forked at any time.

Records pass through Unix sockets, a pair for each stream. Their buffers are small, and a stream has at most
`stream_bytes` under way anyway, so the other process never holds much.
"""

from __future__ import annotations

import itertools
import json
import logging
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from weightgrad.errors import LinkError
from weightgrad.runtime.security.credentials import Credentials
from weightgrad.runtime.transport import connection_process
from weightgrad.runtime.transport.channels import Call, CallError, Channels, Metadata, Options, Status
from weightgrad.runtime.transport.connection_process import ConnectionProcess
from weightgrad.runtime.transport.socket_frames import FrameReader, Kind, send_frame
from weightgrad.runtime.transport.transport import Data, Traffic

log = logging.getLogger("weightgrad")

_ANSWER_S = 30.0  # for an answer that needs no network; a busy machine may take a while to start the process
_numbers = itertools.count(1)


class ProcessChannels(Channels):
    """Channels of gRPC in the process of this process's connections, which is started on first use.

    Args:
        address: the server's HOST:PORT.
        credentials: the site's certificates; None connects without TLS.
        options: the arguments of each channel (`grpc_settings.channel_options`).
    """

    def __init__(self, address: str, *, credentials: Credentials | None, options: Sequence[Options]) -> None:
        self.address, self.count = address, len(options)
        self._number = next(_numbers)
        pems = None
        if credentials is not None:
            pems = [pem.decode() for pem in (credentials.ca, credentials.key, credentials.certificate)]
        self._facts = {"address": address, "credentials": pems, "options": options}
        self._lock = threading.Lock()
        self._process: ConnectionProcess | None = None  # where the channels are open
        self._closed = False
        self._before = Traffic()  # through processes that have ended
        self._total: Traffic | None = None
        self._round_trip_s = 0.0

    def ask(self, request: bytes, metadata: Metadata, timeout: float) -> tuple[bytes, Mapping[str, str]]:
        """See `Channels.ask`."""
        process, answer = self._do("enter", metadata=metadata, timeout=timeout)
        with answer:
            answer.settimeout(timeout + _ANSWER_S)
            try:
                send_frame(answer, Kind.RECORD, request)
                reader = FrameReader(answer)
                first = _read(reader)
                if first is not None and first[0] is Kind.END:
                    raise CallError(Status(*json.loads(bytes(first[1]))))
                metadata_reply = json.loads(bytes(first[1])) if first is not None else {}
                second = _read(reader)
            except TimeoutError:
                raise CallError(Status("DEADLINE_EXCEEDED", "the process of the connections does not answer")) from None
            except OSError:
                second = None
            if second is None:
                raise CallError(Status("UNAVAILABLE", process.why_ended()))
            return bytes(second[1]), metadata_reply

    def open(self, number: int, records: Iterator[bytes], metadata: Metadata, last: bytes = b"") -> Call:
        """See `Channels.open`."""
        return _ProcessCall(*self._do("stream", number=number, metadata=metadata, last=last.hex()), records)

    def socket_bytes(self) -> tuple[Traffic | None, float]:
        """See `Channels.socket_bytes`."""
        process = self._process
        if process is not None and not self._closed:
            with suppress(OSError, LinkError):
                found = _answer(process.ask({"do": "count", "client": self._number}))
                if found is not None:
                    count, self._round_trip_s = found
                    self._total = None if count is None else Traffic(*count)
        return None if self._total is None else self._before + self._total, self._round_trip_s

    def close(self) -> None:
        """See `Channels.close`."""
        with self._lock:
            process, closed, self._closed = self._process, self._closed, True
        if process is not None and not closed:
            with suppress(OSError):
                _answer(process.ask({"do": "close", "client": self._number}))

    def _do(self, what: str, **more: Any) -> tuple[ConnectionProcess, socket.socket]:
        """Ask the process, or a new one if it has ended."""
        for _ in range(3):
            with self._lock:
                if self._closed:
                    raise LinkError(f"the connection to {self.address} was closed; make a new one")
                process = connection_process.shared()
                with suppress(OSError):
                    if process is not self._process:
                        self._open_in(process)
                    return process, process.ask({"do": what, "client": self._number, **more})
        raise LinkError(f"{process.why_ended()}, and so did others before it; look for what ends them")

    def _open_in(self, process: ConnectionProcess) -> None:
        if self._process is not None:
            log.warning("%s; it is started again, and the sessions go on", self._process.why_ended())
        process.ask(
            {"do": "open", "client": self._number, "path": [str(place) for place in sys.path], **self._facts}
        ).close()
        self._process = process
        self._before, self._total = self._before + (self._total or Traffic()), None


class _ProcessCall(Call):
    def __init__(self, process: ConnectionProcess, connection: socket.socket, records: Iterator[bytes]) -> None:
        self._process, self._connection, self._records = process, connection, records
        self._status: Status | None = None
        self._cancelled = False
        threading.Thread(target=self._write, name="records", daemon=True).start()

    def _write(self) -> None:
        with suppress(OSError):
            for record in self._records:
                send_frame(self._connection, Kind.RECORD, record)
            send_frame(self._connection, Kind.HALF_CLOSE)

    def __iter__(self) -> Iterator[Data]:
        reader = FrameReader(self._connection)
        try:
            while (found := _read(reader)) is not None and found[0] is not Kind.END:
                yield found[1]
            if found is not None:
                self._status = Status(*json.loads(bytes(found[1])))
        finally:
            self._hang_up()
            self._connection.close()

    def status(self) -> Status:
        if self._status is None:
            self._status = (
                Status("CANCELLED", "") if self._cancelled else Status("UNAVAILABLE", self._process.why_ended())
            )
        return self._status

    def cancel(self) -> None:
        self._cancelled = True
        self._hang_up()

    def _hang_up(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


def _read(reader: FrameReader) -> tuple[Kind, memoryview] | None:
    try:
        return reader.read()
    except TimeoutError:
        raise
    except OSError:
        return None


def _answer(connection: socket.socket) -> Any:
    """The facts that come as an answer; None if none come."""
    with connection:
        connection.settimeout(_ANSWER_S)
        try:
            found = FrameReader(connection).read()
        except OSError:
            return None
        return None if found is None else json.loads(bytes(found[1]))

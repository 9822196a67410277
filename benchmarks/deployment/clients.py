"""Sites that only send: they join, send the initial model and push like real ones, but the push is encoded once.

Rounds are synchronous, so one site, the leader, can decide which round is the last: it decides before its own push for
that round, and no other site can be further.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import SpawnContext
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import xxhash
from deployment.server_process import cpu_seconds, file_bytes_written

from weightgrad import codecs
from weightgrad.core import pieces
from weightgrad.core.global_model import digest_of, segments_of
from weightgrad.core.layout import Layout
from weightgrad.errors import LinkError, RunError
from weightgrad.runtime.admission_messages import AdmissionRequest, parse_reply
from weightgrad.runtime.security.credentials import Credentials
from weightgrad.runtime.site.server_entry import rank_request
from weightgrad.runtime.transport.grpc_channels import GrpcChannels
from weightgrad.runtime.transport.grpc_client import GrpcClient
from weightgrad.runtime.transport.grpc_settings import channel_options
from weightgrad.runtime.transport.transport import LinkEvent
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_bytes import to_buffers, unpack
from weightgrad.wire.message_parts import model_parts, of_holder, push_parts, without_values
from weightgrad.wire.message_sizes import nbytes
from weightgrad.wire.messages import Holding, Join, JoinReply, Message, Push, ResultPart, Segment

TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Load:
    """The work of one process of clients.

    Attributes:
        address: The address of the global server.
        certificates: The directory of the certificates; None without TLS.
        sites: The sites that this process plays.
        leader: The site that measures and that ends the run.
        numel: The number of parameters.
        codec: The codec of the pushes.
        warm: Rounds before the clock starts.
        seconds: How long rounds are measured.
        processes: Of the server.
    """

    address: str
    certificates: Path | None
    sites: tuple[str, ...]
    leader: str
    numel: int
    codec: str
    warm: int
    seconds: float
    processes: int = 1


@dataclass(frozen=True)
class Found:
    """What the leader measured, or the message of a client that failed."""

    rounds: int = 0
    seconds: float = 0.0
    push_bytes: int = 0
    result_bytes: int = 0
    cpu: tuple[float, float] = (0.0, 0.0)  # of the server, at the start and at the end of the measurement
    written: tuple[int, int] = (0, 0)  # bytes that the server had written to its disk, likewise
    failed: str = ""


def run(load: Load, pids: Sequence[int], last: Any, results: SimpleQueue[Found]) -> None:
    """Run the sites of one process, each in a thread."""
    torch.set_num_threads(1)
    first, threads = torch.zeros(load.numel), []
    for name in load.sites:
        site = _Client(load, name, pids, last)
        thread = threading.Thread(target=site.guarded, args=(_update(load, name), first, results), daemon=True)
        threads.append(thread)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _update(load: Load, site: str) -> tuple[Segment, ...]:
    """The push of a site, in pieces. Each site has its own, because the largest entries of two sites differ."""
    codec, seed = codecs.parse(load.codec), xxhash.xxh32_intdigest(site.encode())
    generator = torch.Generator().manual_seed(seed)
    layout, found = Layout.of_shapes([("weight", (load.numel,))]), []
    served = pieces.divide(layout, load.processes, whole_tensors=False)
    for piece in (one for own in served for one in pieces.cut(own, layout, per_tensor=False)):
        update = torch.randn(piece.numel, generator=generator) * 1e-3
        payload, _ = codec.encode(update, codec.init(update), seed)
        found.append(Segment.at(piece.intervals, payload))
    return tuple(found)


def start(loads: list[Load], pids: Sequence[int], context: SpawnContext) -> Found:
    """Run all processes of clients.

    Args:
        loads: One for each process.
        pids: The processes of the server.
        context: How processes are started.

    Returns:
        What the leader measured.

    Raises:
        RunError: A client failed.
    """
    last, results = context.Value("q", 2**62), context.SimpleQueue()
    children = [context.Process(target=run, args=(load, pids, last, results), daemon=True) for load in loads]
    for child in children:
        child.start()
    try:
        while results.empty():
            if all(child.exitcode is not None for child in children):
                raise RunError("the clients ended without a result")
            time.sleep(0.05)
        found: Found = results.get()
        if found.failed:
            raise RunError(found.failed)
        for child in children:
            child.join(60)
        return found
    finally:
        for child in children:
            child.kill()


class _Client:
    """A site of one rank that only sends, with a connection to each process of the server."""

    def __init__(self, load: Load, name: str, pids: Sequence[int], last: Any) -> None:
        self._load, self._name, self._pids, self._last = load, name, pids, last
        self._epoch = xxhash.xxh32_intdigest(name.encode()) >> 1
        self._links = [self._connect(load.address)]
        self._served: list[Intervals] = []
        self._parts = 0  # of all server processes, that ended a result

    def _connect(self, address: str) -> GrpcClient:
        certificates = self._load.certificates
        credentials = None
        if certificates is not None:
            credentials = Credentials.load(certificates, site=self._name).for_client()
        channels = GrpcChannels(address, credentials=credentials, options=channel_options())
        return GrpcClient(channels, site=self._name, incarnation=1)

    def guarded(self, segments: tuple[Segment, ...], first: torch.Tensor, results: SimpleQueue[Found]) -> None:
        """Join, do all rounds and leave. An error is reported to the parent process."""
        try:
            self._enter(first)
            found = self._rounds(segments)
            for link in self._links:
                link.close(5.0)
            if self._name == self._load.leader:
                results.put(found)
        except Exception as error:
            results.put(Found(failed=f"{self._name}: {type(error).__name__}: {error}"))

    def _enter(self, first: torch.Tensor) -> None:
        whole = Intervals.whole(self._load.numel)
        ask = AdmissionRequest(site=self._name, layout=[("weight", [self._load.numel])], version=-1, epoch=self._epoch)
        reply = parse_reply(self._links[0].enter(ask.pack(), timeout=TIMEOUT_S))
        self._links[0].start()
        for address, _ in reply.servers[1:]:
            host = self._load.address.rpartition(":")[0]
            link = self._connect(host + address if address.startswith(":") else address)
            link.enter(rank_request(self._name, 0), timeout=TIMEOUT_S)
            link.start()
            self._links.append(link)
        self._served = [Intervals.of((start, stop) for start, stop in spans) for _, spans in reply.servers]
        for link, served in zip(self._links, self._served, strict=True):
            message = Holding(site=self._name, rank=0, ranks=1, epoch=self._epoch, held=whole)
            link.send(to_buffers(message))
            if reply.init_model:
                cut = pieces.cut(served, Layout.of_shapes([("weight", (self._load.numel,))]), per_tensor=False)
                for part in model_parts(0, [("weights", segments_of(first, whole, cut))]):
                    link.send(to_buffers(part))
        join = Join(site=self._name, version=0, epoch=self._epoch, digest=digest_of(first, whole))
        self._links[0].send(to_buffers(join), control=True)
        while not isinstance(self._next(0)[0], JoinReply):
            pass

    def _rounds(self, segments: tuple[Segment, ...]) -> Found:
        leads, number, began, sent, came = self._name == self._load.leader, 0, 0.0, 0, 0
        cpu, written = [0.0, 0.0], [0, 0]
        while number < self._last.value:
            number += 1
            if leads and number == self._load.warm + 1:
                began, cpu[0], written[0] = time.perf_counter(), self._cpu(), self._written()
            if leads and began and time.perf_counter() - began > self._load.seconds:
                self._last.value = number
            sent = self._push(number, segments)
            came = self._result(number)
        seconds = time.perf_counter() - began
        cpu[1], written[1] = self._cpu(), self._written()
        return Found(number - self._load.warm, seconds, sent, came, (cpu[0], cpu[1]), (written[0], written[1]))

    def _push(self, number: int, segments: tuple[Segment, ...]) -> int:
        push = Push(
            site=self._name, round=number, after=number - 1, step=number, seen=number - 1, samples=1, segments=segments
        )
        self._links[0].send(to_buffers(without_values(push)), control=True)
        size = 0
        for link, served in zip(self._links, self._served, strict=True):
            own = replace(push, segments=of_holder(segments, served))
            for part in push_parts(own, 0):
                link.send(to_buffers(part))
                size += nbytes(part)
        return size

    def _result(self, version: int) -> int:
        """Wait for the result of a round from all server processes, and return its bytes."""
        size, missing = 0, set(range(len(self._links)))
        while missing:
            place = min(missing)
            message, length = self._next(place)
            if isinstance(message, ResultPart):
                size += length
                if message.last and message.version == version:
                    missing.discard(place)
        return size

    def _next(self, place: int) -> tuple[Message, int]:
        """Wait for the next message of a server process; returns it and its length."""
        until, link = time.monotonic() + TIMEOUT_S, self._links[place]
        while (data := link.receive(1.0)) is None:
            if {LinkEvent.GONE, LinkEvent.REFUSED} & set(link.events()) or time.monotonic() > until:
                raise LinkError(f"no message came: {link.why}")
        return unpack(data), len(data)

    def _cpu(self) -> float:
        return sum(cpu_seconds(pid) for pid in self._pids)

    def _written(self) -> int:
        return sum(file_bytes_written(pid) for pid in self._pids)

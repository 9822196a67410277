"""Sites that only send: they join, send the initial model and push like real ones, but the push is encoded once.

Rounds are synchronous, so one site, the leader, can decide which round is the last: it decides before its own push for
that round, and no other site can be further.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from multiprocessing.context import SpawnContext
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import xxhash
from deployment.server_process import cpu_seconds

from weightgrad import codecs
from weightgrad.errors import LinkError, RunError
from weightgrad.runtime.admission import AdmissionRequest, parse_reply
from weightgrad.runtime.security.credentials import Credentials
from weightgrad.runtime.transport.grpc_client import GrpcClient
from weightgrad.runtime.transport.transport import LinkEvent
from weightgrad.wire import message_header
from weightgrad.wire.message_bytes import pack
from weightgrad.wire.messages import InitModel, Join, JoinReply, Push, RoundResult, Segment

TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Load:
    """The work of one process of clients.

    Attributes:
        address: The address of the global server.
        certificates: The directory of the certificates.
        sites: The sites that this process plays.
        leader: The site that measures and that ends the run.
        numel: The number of parameters.
        codec: The codec of the pushes.
        warm: Rounds before the clock starts.
        seconds: How long rounds are measured.
    """

    address: str
    certificates: Path
    sites: tuple[str, ...]
    leader: str
    numel: int
    codec: str
    warm: int
    seconds: float


@dataclass(frozen=True)
class Found:
    """What the leader measured, or the message of a client that failed."""

    rounds: int = 0
    seconds: float = 0.0
    push_bytes: int = 0
    result_bytes: int = 0
    cpu: tuple[float, float] = (0.0, 0.0)  # of the server, at the start and at the end of the measurement
    failed: str = ""


def run(load: Load, pid: int, last: Any, results: SimpleQueue[Found]) -> None:
    """Run the sites of one process, each in a thread."""
    torch.set_num_threads(1)
    first, threads = torch.zeros(load.numel), []
    for name in load.sites:
        site = _Client(load, name, pid, last)
        thread = threading.Thread(target=site.guarded, args=(_update(load, name), first, results), daemon=True)
        threads.append(thread)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _update(load: Load, site: str) -> tuple[Segment, ...]:
    """The push of a site. Each site has its own, because the largest entries of two sites differ."""
    codec, seed = codecs.parse(load.codec), xxhash.xxh32_intdigest(site.encode())
    update = torch.randn(load.numel, generator=torch.Generator().manual_seed(seed)) * 1e-3
    return (Segment(0, codec.encode(update, codec.init(update), seed)[0]),)


def start(loads: list[Load], pid: int, context: SpawnContext) -> Found:
    """Run all processes of clients.

    Returns:
        What the leader measured.

    Raises:
        RunError: A client failed.
    """
    last, results = context.Value("q", 2**62), context.SimpleQueue()
    children = [context.Process(target=run, args=(load, pid, last, results), daemon=True) for load in loads]
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
    """A site that only sends."""

    def __init__(self, load: Load, name: str, pid: int, last: Any) -> None:
        self._load, self._name, self._pid, self._last = load, name, pid, last
        credentials = Credentials.load(load.certificates, site=name).for_client()
        self._connection = GrpcClient(load.address, site=name, incarnation=1, credentials=credentials)

    def guarded(self, segments: tuple[Segment, ...], first: torch.Tensor, results: SimpleQueue[Found]) -> None:
        """Join, do all rounds and leave. An error is reported to the parent process."""
        try:
            self._enter(first)
            found = self._rounds(segments)
            self._connection.close(5.0)
            if self._name == self._load.leader:
                results.put(found)
        except Exception as error:
            results.put(Found(failed=f"{self._name}: {type(error).__name__}: {error}"))

    def _enter(self, first: torch.Tensor) -> None:
        digest = xxhash.xxh3_64_hexdigest(first.numpy().tobytes())
        ask = AdmissionRequest(site=self._name, layout=[("weight", [self._load.numel])], digest=digest, version=-1)
        reply = parse_reply(self._connection.enter(ask.pack(), timeout=TIMEOUT_S))
        self._connection.start()
        if reply.init_model:
            self._connection.send(pack(InitModel(site=self._name, snapshot={"weights": first})))
        self._connection.send(pack(Join(site=self._name, version=0)))
        self._next(JoinReply)

    def _rounds(self, segments: tuple[Segment, ...]) -> Found:
        leads, number, began, sent, came = self._name == self._load.leader, 0, 0.0, 0, 0
        cpu = [0.0, 0.0]
        while number < self._last.value:
            number += 1
            if leads and number == self._load.warm + 1:
                began, cpu[0] = time.perf_counter(), cpu_seconds(self._pid)
            if leads and began and time.perf_counter() - began > self._load.seconds:
                self._last.value = number
            data = pack(
                Push(
                    site=self._name,
                    round=number,
                    after=number - 1,
                    step=number,
                    seen=number - 1,
                    samples=1,
                    segments=segments,
                )
            )
            self._connection.send(data)
            sent, came = len(data), self._next(RoundResult)
        seconds = time.perf_counter() - began
        cpu[1] = cpu_seconds(self._pid)
        return Found(number - self._load.warm, seconds, sent, came, (cpu[0], cpu[1]))

    def _next(self, kind: type[JoinReply] | type[RoundResult]) -> int:
        """Wait for the next message, which must be of this kind, and return its length."""
        until = time.monotonic() + TIMEOUT_S
        while (data := self._connection.receive(1.0)) is None:
            if {LinkEvent.GONE, LinkEvent.REFUSED} & set(self._connection.events()) or time.monotonic() > until:
                raise LinkError(f"no {kind.__name__} came: {self._connection.why}")
        if (came := message_header.parse(data).kind) is not kind:
            raise RunError(f"wanted a {kind.__name__}, and a {came.__name__} came")
        return len(data)

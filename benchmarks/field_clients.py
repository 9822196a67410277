"""Sites that only send: they enter, plant and push like real ones, but what they push was encoded beforehand.

Rounds are synchronous, so the leader alone can say which is the last: it does so before it pushes for it, and no
other site can be further.
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
from field_process import cpu_seconds

from weightgrad import codecs
from weightgrad.errors import LinkError, RunError
from weightgrad.runtime.admission import Ask, read_admission
from weightgrad.runtime.credentials import Credentials
from weightgrad.runtime.lanes_client import GONE, REFUSED, LanesClient
from weightgrad.wan import message_header
from weightgrad.wan.message_bytes import pack
from weightgrad.wan.messages import Answer, Join, Part, Plant, Push, Welcome

PATIENCE_S = 300.0


@dataclass(frozen=True)
class Load:
    """What one process of clients does."""

    address: str
    certificates: Path
    sites: tuple[str, ...]
    leader: str
    numel: int
    codec: str
    warm: int  # rounds before the clock starts
    seconds: float


@dataclass(frozen=True)
class Found:
    """What the leader saw, or the words of whoever failed."""

    rounds: int = 0
    seconds: float = 0.0
    push_bytes: int = 0
    answer_bytes: int = 0
    cpu: tuple[float, float] = (0.0, 0.0)  # of the server, when the clock started and stopped
    failed: str = ""


def run(load: Load, pid: int, last: Any, told: SimpleQueue[Found]) -> None:
    """The sites of one process, each in its thread."""
    torch.set_num_threads(1)
    first, threads = torch.zeros(load.numel), []
    for name in load.sites:
        site = _Client(load, name, pid, last)
        thread = threading.Thread(target=site.guarded, args=(_update(load, name), first, told), daemon=True)
        threads.append(thread)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _update(load: Load, site: str) -> tuple[Part, ...]:
    """What the site pushes in every round: its own, as two sites' top entries are not the same ones."""
    codec, seed = codecs.parse(load.codec), xxhash.xxh32_intdigest(site.encode())
    update = torch.randn(load.numel, generator=torch.Generator().manual_seed(seed)) * 1e-3
    return (Part(0, codec.encode(update, codec.init(update), seed)[0]),)


def start(loads: list[Load], pid: int, context: SpawnContext) -> Found:
    """All processes of clients; what the leader found."""
    last, told = context.Value("q", 2**62), context.SimpleQueue()
    children = [context.Process(target=run, args=(load, pid, last, told), daemon=True) for load in loads]
    for child in children:
        child.start()
    try:
        while told.empty():
            if all(child.exitcode is not None for child in children):
                raise RunError("the clients ended without a word")
            time.sleep(0.05)
        found: Found = told.get()
        if found.failed:
            raise RunError(found.failed)
        for child in children:
            child.join(60)
        return found
    finally:
        for child in children:
            child.kill()


class _Client:
    """One site."""

    def __init__(self, load: Load, name: str, pid: int, last: Any) -> None:
        self._load, self._name, self._pid, self._last = load, name, pid, last
        credentials = Credentials.load(load.certificates, site=name).for_client()
        self._line = LanesClient(load.address, site=name, incarnation=1, credentials=credentials)

    def guarded(self, parts: tuple[Part, ...], first: torch.Tensor, told: SimpleQueue[Found]) -> None:
        """All of it; an error is told."""
        try:
            self._enter(first)
            found = self._rounds(parts)
            self._line.close(5.0)
            if self._name == self._load.leader:
                told.put(found)
        except Exception as error:
            told.put(Found(failed=f"{self._name}: {type(error).__name__}: {error}"))

    def _enter(self, first: torch.Tensor) -> None:
        digest = xxhash.xxh3_64_hexdigest(first.numpy().tobytes())
        ask = Ask(site=self._name, layout=[("weight", [self._load.numel])], digest=digest, version=-1)
        admission = read_admission(self._line.enter(ask.pack(), timeout=PATIENCE_S))
        self._line.start()
        if admission.plant:
            self._line.send(pack(Plant(self._name, {"base": first})))
        self._line.send(pack(Join(self._name, 0)))
        self._next(Welcome)

    def _rounds(self, parts: tuple[Part, ...]) -> Found:
        leads, number, began, sent, came = self._name == self._load.leader, 0, 0.0, 0, 0
        cpu = [0.0, 0.0]
        while number < self._last.value:
            number += 1
            if leads and number == self._load.warm + 1:
                began, cpu[0] = time.perf_counter(), cpu_seconds(self._pid)
            if leads and began and time.perf_counter() - began > self._load.seconds:
                self._last.value = number
            data = pack(Push(self._name, number, number - 1, number, number - 1, 1, parts))
            self._line.send(data)
            sent, came = len(data), self._next(Answer)
        seconds = time.perf_counter() - began
        cpu[1] = cpu_seconds(self._pid)
        return Found(number - self._load.warm, seconds, sent, came, (cpu[0], cpu[1]))

    def _next(self, kind: type[Welcome] | type[Answer]) -> int:
        """Wait for the next message, which must be of that kind; its length."""
        until = time.monotonic() + PATIENCE_S
        while (data := self._line.receive(1.0)) is None:
            if {GONE, REFUSED} & set(self._line.events()) or time.monotonic() > until:
                raise LinkError(f"no {kind.__name__} came: {self._line.why}")
        if (came := message_header.parse(data).kind) is not kind:
            raise RunError(f"wanted a {kind.__name__}, and a {came.__name__} came")
        return len(data)

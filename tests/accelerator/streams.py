"""Streams, events and copies of the pretend accelerator, and what goes wrong when nobody waits.

A stream does its work in order; between streams, and between a stream and the host, there is no order but that of
events. So three things are watched here:

- A copy that the host does not wait for leaves garbage in its target until an event behind it has been waited for.
- The host may not write to memory from which a copy is made before it has waited for that copy. That is noticed when
  it waits, or at the end of the case.
- A stream may not touch memory that another stream writes, or write memory that another one reads, unless it waits
  for that stream first. Every stream has a clock, and knows how far it has waited for the others (vector clocks).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

GARBAGE = 0xA5
"""What memory holds that a copy on its way has not reached."""


_LOCK = threading.RLock()  # several threads use the device: those of sites, and those of autograd


class RaceError(AssertionError):
    """Something was used, or overwritten, before it was waited for."""


@dataclass
class Memory:
    """Who used some memory of the device last: for each stream, the time of its last read and of the last write."""

    written: tuple[Stream, int] | None = None
    read: dict[Stream, int] = field(default_factory=dict)


@dataclass
class _Copy:
    """A copy on its way: at which time of its stream it happens, and what the host sees when it has waited for it."""

    time: int
    arrive: Callable[[], None]


class Stream:
    """Work of the device that is done in order."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        del device, priority
        self.time = 0
        self._seen: dict[Stream, int] = {}
        self._copies: list[_Copy] = []
        _STREAMS.append(self)

    def touch(self, reads: list[Memory], writes: list[Memory]) -> None:
        """Do something with memory of the device now."""
        with _LOCK:
            self._touch(reads, writes)

    def _touch(self, reads: list[Memory], writes: list[Memory]) -> None:
        self.time += 1
        for memory in (*reads, *writes):
            if memory.written is not None:
                self._check(*memory.written, "uses memory that another stream has written")
        for memory in writes:
            for stream, time in memory.read.items():
                self._check(stream, time, "writes memory that another stream reads")
            memory.written, memory.read = (self, self.time), {}
        for memory in reads:
            memory.read[self] = self.time

    def _check(self, stream: Stream, time: int, what: str) -> None:
        if stream is not self and max(self._seen.get(stream, 0), _HOST.get(stream, 0)) < time:
            raise RaceError(f"a stream {what}, and has not waited for it")

    def copy_to_host(self, source: Tensor, target: Tensor) -> None:
        """Copy to pinned memory, which holds garbage until the host has waited."""
        found = source.clone()
        target.view(-1).view(torch.uint8).fill_(GARBAGE)

        def arrive() -> None:
            target.copy_(found)

        with _LOCK:
            self._copies.append(_Copy(self.time, arrive))

    def copy_from_host(self, source: Tensor, target: Tensor) -> None:
        """Copy from pinned memory, which the host must leave alone until it has waited."""
        found = source.clone()
        target.copy_(found)

        def arrive() -> None:
            if not torch.equal(source.view(-1).view(torch.uint8), found.view(-1).view(torch.uint8)):
                raise RaceError("the host has overwritten memory from which a copy was on its way")

        with _LOCK:
            self._copies.append(_Copy(self.time, arrive))

    def arrived(self, time: int) -> None:
        """The host has waited for everything up to a time, so that comes before all that it asks for from now on."""
        with _LOCK:
            _HOST[self] = max(_HOST.get(self, 0), time)
            while self._copies and self._copies[0].time <= time:
                self._copies.pop(0).arrive()

    def record_event(self, event: Event | None = None) -> Event:
        """An event behind everything that the stream was given."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Do nothing more before an event."""
        with _LOCK:
            for stream, time in event.clock.items():
                self._seen[stream] = max(self._seen.get(stream, 0), time)

    def wait_stream(self, other: Stream) -> None:
        """Do nothing more before another stream has done what it was given."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """Let the host wait for everything on this stream."""
        self.record_event().synchronize()

    def clock(self) -> dict[Stream, int]:
        """How far this stream and those that it has waited for have come."""
        with _LOCK:
            return {**self._seen, self: self.time}


class Event:
    """A point in the work of a stream."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        del enable_timing, blocking, interprocess
        self.clock: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        """Put the event behind what a stream was given."""
        self.clock = (current_stream() if stream is None else stream).clock()

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait for it."""
        (current_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        """Whether it is over; the host cannot count on it."""
        return False

    def synchronize(self) -> None:
        """Let the host wait for it."""
        for stream, time in self.clock.items():
            stream.arrived(time)


def finish() -> None:
    """Let all copies end, also those that nobody has waited for: the memory that they came from must be as it was."""
    for one in _STREAMS:
        one.arrived(one.time)


_STREAMS: list[Stream] = []
_HOST: dict[Stream, int] = {}  # how far the host has waited for each stream
_DEFAULT = Stream()
_current = threading.local()


def current_stream(device: object = None) -> Stream:
    """The stream of this thread; all threads begin with the same one, as on a real device."""
    del device
    found: Stream = getattr(_current, "stream", _DEFAULT)
    return found


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    """Give this thread another stream."""
    before = current_stream()
    _current.stream = chosen
    try:
        yield
    finally:
        _current.stream = before


class DeviceModule:
    """What `torch.get_device_module` returns for the pretend accelerator, as `torch.cuda` is for CUDA."""

    Stream, Event = Stream, Event
    stream, current_stream = staticmethod(stream), staticmethod(current_stream)

    def is_initialized(self) -> bool:
        """Always."""
        return True

    def is_available(self) -> bool:
        """Always."""
        return True

    def current_device(self) -> int:
        """The only one."""
        return 0

    def device_count(self) -> int:
        """One."""
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """It has no generator."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """What autocast may use."""
        return [torch.float16, torch.bfloat16]

    def get_rng_state(self, device: object = None) -> Tensor:
        """It has no generator."""
        del device
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        """It has no generator."""

    def synchronize(self, device: object = None) -> None:
        """Refused: it would stop streams that are not ours."""
        del device
        raise AssertionError("the whole device was synchronized; wait for an event")

"""The self-check of an emulated network: does every link have the rate and the delay that were asked for?

Real TCP connections measure every direction: the rate within 5 %, the round trip within 2 ms. Rates are those of the
line, as in every shaper: a packet of 1514 bytes carries 1448 bytes of a TCP stream. Loss and jitter are switched off
while the rate is measured, because with them TCP does not fill a line. Directions are measured at the same time as long
as they stay below 400 Mbit/s together: more would measure the machine.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightgrad.errors import EmulatorError
from weightgrad.lab.emulate.namespaces import HERE, PYTHON
from weightgrad.lab.emulate.topology import WanLink
from weightgrad.units import show_bit_s, show_seconds

if TYPE_CHECKING:
    from weightgrad.lab.emulate.network import Network

LINE_BYTES, STREAM_BYTES = 1514, 1448
RATE_SHARE, ROUND_TRIP_SECONDS = 0.05, 0.002
_TOGETHER_BIT_S = 400e6
_ECHOES, _TIMEOUT_S = 10, 10.0
_STEADY_S, _STEADY_BYTES = 0.6, 150_000  # at least, both
_FILL = 0.75  # of the queue: not full, so nothing is dropped; not empty, so the line is never idle
_MOST_WINDOW_BYTES = 1 << 20  # of a connection; some kernels allow no more
_FIRST_WINDOW_BYTES = 10 * STREAM_BYTES  # slow start begins with it
_numbers = itertools.count()
_PROBE = (*PYTHON, str(HERE / "probe.py"))


@dataclass(frozen=True)
class LinkCheck:
    """One direction of a link: what was asked for and what was measured; 0 means that nothing got through."""

    sender: str
    receiver: str
    asked_bit_s: float
    measured_bit_s: float
    asked_round_trip_s: float
    measured_round_trip_s: float
    jitter_s: float = 0.0

    @property
    def rate_error(self) -> float:
        """Relative error of the rate."""
        return self.measured_bit_s / self.asked_bit_s - 1

    @property
    def round_trip_error_s(self) -> float:
        """Error of the round trip in seconds."""
        return self.measured_round_trip_s - self.asked_round_trip_s

    @property
    def ok(self) -> bool:
        """Whether both errors are within bounds; jitter may add to the round trip."""
        late = abs(self.round_trip_error_s) <= ROUND_TRIP_SECONDS + 2 * self.jitter_s
        return late and abs(self.rate_error) <= RATE_SHARE and self.measured_round_trip_s > 0

    def __str__(self) -> str:
        rate = f"{show_bit_s(self.measured_bit_s)} of {show_bit_s(self.asked_bit_s)} ({100 * self.rate_error:+.1f} %)"
        trip = f"{show_seconds(self.measured_round_trip_s)} of {show_seconds(self.asked_round_trip_s)}"
        return f"{self.sender} → {self.receiver}: {rate}, round trip {trip}: {'ok' if self.ok else 'WRONG'}"


@dataclass(frozen=True)
class Flood:
    """How to fill one direction of a link: connections, the window of each, the duration, and its steady last part."""

    connections: int
    window_bytes: int
    seconds: float
    steady_seconds: float

    @classmethod
    def of(cls, link: WanLink, sender: str) -> Flood:
        """Fill the line and most of its queue, with time for slow start and for a steady measurement.

        Few connections: TCP cuts what many slow connections send into small packets, which cost as much as large ones.
        """
        rate = link.rate_bit_s(sender) / 8
        queued = _FILL * link.queue_bytes(sender)
        window = (rate * link.round_trip_seconds + queued) * STREAM_BYTES / LINE_BYTES
        connections = max(4, min(math.ceil(window / 262_144), 8), math.ceil(window / _MOST_WINDOW_BYTES))
        doublings = max(math.log2(window / connections / _FIRST_WINDOW_BYTES), 0)
        ramp = doublings * link.round_trip_seconds + 2 * (link.round_trip_seconds + queued / rate)
        steady = min(max(_STEADY_BYTES / rate, _STEADY_S), 2.0)
        return cls(connections, max(int(window / connections), 4096), ramp + steady, steady)


def check_links(network: Network) -> tuple[LinkCheck, ...]:
    """Measure every direction of every link; links that fail are measured once more."""
    with ExitStack() as stack:
        servers = {name: stack.enter_context(_Server(network, name)) for name in network.hosts}
        links = network.links
        found = _measure(network, servers, links)
        again = [link for link in links if not all(check.ok for check in found[link])]
        found |= _measure(network, servers, again)
    return tuple(check for both in found.values() for check in both)


def _measure(
    network: Network, servers: dict[str, _Server], links: Sequence[WanLink]
) -> dict[WanLink, tuple[LinkCheck, ...]]:
    trips = _round_trips(network, servers, links)
    for link in links:
        network.set_link(*link.between, jitter_seconds=0.0, loss=0.0)
    try:
        rates = _rates(network, servers, links)
    finally:
        for link in links:
            network.set_link(*link.between, jitter_seconds=link.jitter_seconds, loss=link.loss)
    return {
        link: tuple(
            LinkCheck(
                sender,
                receiver,
                link.rate_bit_s(sender),
                rates[sender, receiver],
                link.round_trip_seconds,
                trips[frozenset(link.between)],
                link.jitter_seconds,
            )
            for sender, receiver in (link.between, link.between[::-1])
        )
        for link in links
    }


class _Server:
    """The server of probe.py on one host."""

    def __init__(self, network: Network, name: str) -> None:
        self._process = network.host(name).popen(
            [*_PROBE, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self._process.stdout.readline())  # type: ignore[union-attr]

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):  # it had ended before
            self._process.communicate()

    def rate_bit_s(self, number: int, since: float, until: float) -> float:
        """The rate of a flood between two times in which it was steady."""
        line = ""
        with contextlib.suppress(BrokenPipeError):
            print(number, file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise EmulatorError("the server of the self-check has ended unexpectedly; was it killed?")
        return steady_bit_s(json.loads(line), since, until)


def steady_bit_s(samples: Sequence[tuple[float, int]], since: float, until: float) -> float:
    """The line rate, from samples of (second, stream bytes received so far)."""
    steady = [sample for sample in samples if since <= sample[0] <= until]
    if len(steady) < 2:
        return 0.0
    (start, first), (end, last) = steady[0], steady[-1]
    return 8 * (last - first) / (end - start) * LINE_BYTES / STREAM_BYTES


def _client(network: Network, sender: str, receiver: str, server: _Server, what: str, *more: object) -> Any:
    ip, port = network.reach(sender, receiver, server.port).rsplit(":", 1)
    command = [*_PROBE, what, ip, port, *map(str, more)]
    return network.host(sender).popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _outcome(process: subprocess.Popen[str], seconds: float) -> str | None:
    """What a process printed; None if it failed or took too long."""
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None
    return out if process.returncode == 0 else None


def _round_trips(
    network: Network, servers: dict[str, _Server], links: Sequence[WanLink]
) -> dict[frozenset[str], float]:
    clients = {}
    for link in links:
        a, b = link.between
        clients[frozenset((a, b))] = (_client(network, a, b, servers[b], "echo", _ECHOES), link)
    found = {}
    for ends, (client, link) in clients.items():
        # TCP sends lost echoes again after at least a fifth of a second.
        timeout = _TIMEOUT_S + (_ECHOES + 3) * (link.round_trip_seconds + link.loss)
        out = _outcome(client, timeout)
        found[ends] = statistics.median(json.loads(out)) if out else 0.0
    return found


def _rates(network: Network, servers: dict[str, _Server], links: Sequence[WanLink]) -> dict[tuple[str, str], float]:
    found = {}
    for group in _groups(links):
        started = []
        for sender, receiver, link in group:
            flood, number = Flood.of(link, sender), next(_numbers)
            more = (number, flood.connections, flood.seconds, flood.window_bytes)
            started.append((_client(network, sender, receiver, servers[receiver], "flood", *more), flood, number))
        outcomes = [_outcome(client, _TIMEOUT_S + 2 * flood.seconds) for client, flood, _ in started]
        for (sender, receiver, _), (_, flood, number), out in zip(group, started, outcomes, strict=True):
            span = (float(out) - flood.steady_seconds, float(out)) if out else (0.0, 0.0)
            found[sender, receiver] = servers[receiver].rate_bit_s(number, *span)
    return found


def _groups(links: Sequence[WanLink]) -> Iterator[list[tuple[str, str, WanLink]]]:
    """Directions to measure at the same time; never both of a link, because acknowledgements use the way back."""
    todo = [(*ends, link) for link in links for ends in (link.between, link.between[::-1])]
    while todo:
        group: list[tuple[str, str, WanLink]] = []
        for direction in todo:
            sender, _, link = direction
            total = link.rate_bit_s(sender) + sum(other.rate_bit_s(end) for end, _, other in group)
            if all(link is not other for _, _, other in group) and (not group or total <= _TOGETHER_BIT_S):
                group.append(direction)
        todo = [direction for direction in todo if direction not in group]
        yield group

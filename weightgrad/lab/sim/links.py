"""WAN links: bandwidth, one-way delay, loss, TCP's windows, and how they change over time.

A message is a flow of bytes. Flows in one direction of a link share it fairly; flows through the server's network card
share that too (max-min: a flow that its own link limits leaves its share to the others). The last byte arrives one
delay after it left. Loss is modelled by its effect on TCP: a connection gets at most MSS/RTT * sqrt(3/2)/sqrt(loss)
(Mathis et al., 1997), CONNECTIONS of them carry a message, and lost bytes are sent again. A cut link carries nothing;
flows continue when it heals. Messages of one direction arrive in the order in which they were sent, as on any stream.

A direction starts slowly, as TCP does (`windows`): in a round trip it sends no more than its window, which doubles
while it is the limit. After a silence the window is halved for every retransmission time-out that has passed, as in
Linux. The receiving direction counts as active too, at the first byte (gRPC measures the link) and at the last (it is
acknowledged). `weightgrad validate` compares all this with real links. Bandwidth is that of a stream, as iperf
measures it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from weightgrad.runtime.transport.records import DEFAULT_CHUNKING

MSS_BYTES = 1460
CONNECTIONS = DEFAULT_CHUNKING.connections
FIRST_WINDOW_BYTES = 10 * 1448  # initial window of a connection (RFC 6928)
LEAST_TIMEOUT_SECONDS = 0.2  # on top of the round trip
LEAST_QUEUE_SECONDS = 0.05  # the queue in front of a link holds this much, or a round trip


@dataclass(frozen=True)
class Link:
    """A link between the server and a site.

    Attributes:
        between: Names of the two ends.
        bandwidth_bit_s: Bandwidth from the first end to the second.
        delay_seconds: One-way delay.
        loss: Fraction of packets that is lost.
        trace: Bandwidth over time as (second, bit/s), from 0 on.
        back_bit_s: Bandwidth from the second end to the first; None means the same.
    """

    between: tuple[str, str]
    bandwidth_bit_s: float
    delay_seconds: float
    loss: float = 0.0
    trace: tuple[tuple[float, float], ...] = ()
    back_bit_s: float | None = None

    def nominal_bit_s(self, now: float, *, back: bool = False) -> float:
        """The bandwidth at a time, without loss and faults."""
        rate = self.back_bit_s if back and self.back_bit_s is not None else self.bandwidth_bit_s
        for since, changed in self.trace:
            if since <= now:
                rate = changed
        return rate

    def next_change(self, now: float) -> float:
        """When the bandwidth changes next."""
        return min((since for since, _ in self.trace if since > now), default=math.inf)

    def rate_bytes(self, now: float, *, back: bool = False) -> float:
        """Useful bytes a second for one message that has the link to itself."""
        rate = self.nominal_bit_s(now, back=back) / 8
        if self.loss:
            round_trip = max(2 * self.delay_seconds, 1e-4)
            reachable = CONNECTIONS * MSS_BYTES / round_trip * math.sqrt(1.5 / self.loss)
            rate = min(rate, reachable) * (1 - self.loss)
        return rate


@dataclass
class Window:
    """TCP's congestion window of one direction of a link."""

    round_trip: float
    size: float = 0.0
    trip: float = 0.0  # its size when this round trip began
    left: float = math.inf  # bytes that may still leave before `until`
    until: float = -math.inf
    active: float = 0.0  # when something was last sent
    queued: float = 0.0  # mean seconds that packets wait in front of the link
    spread: float = 0.0  # what the time-out adds to the round trip: less with every measured round trip

    def __post_init__(self) -> None:
        self.spread = max(LEAST_TIMEOUT_SECONDS, 2 * self.round_trip)

    def note_activity(self, now: float) -> None:
        """Something is sent, perhaps only an acknowledgement; after a long silence the window shrinks."""
        timeout = self.round_trip + self.queued + self.spread
        halvings = math.ceil((now - self.active) / timeout) - 1
        if halvings > 0:
            self.size = math.ldexp(self.size, -halvings)
        self.active = max(self.active, now)

    def begin(self, now: float, nbytes: int, rate: float) -> None:
        """A message is to be sent, and none is on its way."""
        self.note_activity(now)
        first = FIRST_WINDOW_BYTES * min(CONNECTIONS, DEFAULT_CHUNKING.count(nbytes))
        self.size = max(first, self.size)
        self.queued = min(nbytes / rate, max(self.round_trip, LEAST_QUEUE_SECONDS)) / 2 if rate > 0 else 0.0
        if now >= self.until:
            self._next_round_trip(now, rate)

    def grow(self, now: float, rate: float) -> None:
        """Double the window: it was the limit for a whole round trip."""
        self.size = 2 * self.trip
        self._next_round_trip(now, rate)

    def end(self, now: float) -> None:
        """The last byte has left: what was sent in this round trip is acknowledged before the next message."""
        self.active = now
        if self.left < math.inf:
            self.size = 2 * self.trip - self.left

    def _next_round_trip(self, now: float, rate: float) -> None:
        self.spread -= (self.spread - LEAST_TIMEOUT_SECONDS) / 4
        self.trip = self.size
        self.left = math.inf if self.size >= rate * self.round_trip else self.size
        self.until = now + self.round_trip

    @property
    def is_used_up(self) -> bool:
        """Whether nothing more may leave until the round trip is over."""
        return self.left <= 1e-6


@dataclass(eq=False)
class _Flow:
    link: int
    upward: bool
    left: float  # bytes
    arrive: Callable[[], None]
    sender: str
    receiver: str
    rate: float = 0.0
    finish: float = math.inf
    through: bool = False  # all bytes have left; it waits for the messages sent before it


class Links:
    """All links to the server, and the flows on them; `run` must be called at the time of `next_event`."""

    def __init__(self, server: str, links: list[Link], server_bit_s: float | None, *, windows: bool = True) -> None:
        self._server = server
        self.links = links
        self._to: dict[str, int] = {}
        for place, link in enumerate(links):
            if server in link.between:
                self._to[next(end for end in link.between if end != server)] = place
        self._server_bytes_s = math.inf if server_bit_s is None else server_bit_s / 8
        self._faults: list[dict[object, float]] = [{} for _ in links]  # by cause
        self._flows: list[_Flow] = []
        self._last_time = 0.0
        self._windows = {
            (place, upward): Window(2 * link.delay_seconds)
            for place, link in enumerate(links)
            for upward in (True, False)
            if windows and link.delay_seconds > 0
        }
        self.bytes = [[0, 0] for _ in links]  # towards the first and the second of `between`

    def place(self, first: str, second: str) -> int:
        """Index of the link between two ends."""
        for number, link in enumerate(self.links):
            if set(link.between) == {first, second}:
                return number
        raise KeyError((first, second))

    def delay(self, site: str) -> float:
        """One-way delay between a site and the server."""
        return self.links[self._to[site]].delay_seconds

    def send(self, now: float, sender: str, receiver: str, nbytes: int, arrive: Callable[[], None]) -> None:
        """Send a message; `run` returns `arrive` when its last byte has left, one delay before it arrives."""
        upward = receiver == self._server
        place = self._to[sender if upward else receiver]
        self.bytes[place][self._side(place, receiver)] += nbytes
        self._advance(now)
        window = self._windows.get((place, upward))
        if window is not None and not any((f.link, f.upward) == (place, upward) for f in self._flows):
            window.begin(now, nbytes, self._rate(now, place, upward))
            self._windows[place, not upward].note_activity(now + self.links[place].delay_seconds)
        self._flows.append(_Flow(place, upward, float(nbytes), arrive, sender, receiver))
        self._share(now)

    def _side(self, place: int, receiver: str) -> int:
        return 0 if self.links[place].between[0] == receiver else 1

    def scale(self, now: float, place: int, factor: float, cause: object = None) -> None:
        """Let a link carry this fraction of its bandwidth because of a fault; 0 is a cut, 1 ends this cause."""
        self._advance(now)
        self._faults[place][cause] = factor
        self._share(now)

    def drop(self, now: float, end: str) -> None:
        """Lose every flow from or to this end."""
        self._advance(now)
        for flow in self._flows:
            if end in (flow.sender, flow.receiver):  # bytes that had not left do not count
                self.bytes[flow.link][self._side(flow.link, flow.receiver)] -= int(flow.left)
        self._flows = [f for f in self._flows if end not in (f.sender, f.receiver)]
        self._share(now)

    def next_event(self, now: float) -> float:
        """When a flow ends, a trace changes, or a window opens or is used up."""
        if not self._flows:
            return math.inf
        used = {f.link for f in self._flows}
        changes = min((self.links[place].next_change(now) for place in used), default=math.inf)
        return min(min(f.finish for f in self._flows), changes, self._next_window(now))

    def _next_window(self, now: float) -> float:
        """When a window is used up or opens again."""
        due, speed = math.inf, self._speeds()
        for direction in {(f.link, f.upward) for f in self._flows if not f.through}:
            window = self._windows.get(direction)
            if window is not None and window.is_used_up:
                due = min(due, max(now, window.until))
            elif window is not None and window.left < math.inf and speed.get(direction, 0.0) > 0:
                later = math.nextafter(now, math.inf)  # what is left may be too little to move the clock
                due = min(due, max(later, now + window.left / speed[direction]))
        return due

    def _speeds(self) -> dict[tuple[int, bool], float]:
        found: dict[tuple[int, bool], float] = {}
        for flow in self._flows:
            found[flow.link, flow.upward] = found.get((flow.link, flow.upward), 0.0) + flow.rate
        return found

    def run(self, now: float) -> list[tuple[float, Callable[[], None]]]:
        """The flows that have ended: for each, the delay until it arrives and its `arrive`."""
        self._advance(now)
        for (place, upward), window in self._windows.items():
            if window.is_used_up and now >= window.until:
                window.grow(now, self._rate(now, place, upward))
        kept, arrived, blocked = [], [], set()
        for flow in self._flows:
            flow.through = flow.through or flow.finish <= now
            direction = (flow.link, flow.upward)
            if flow.through and direction not in blocked:
                arrived.append(flow)
            else:
                blocked.add(direction)
                kept.append(flow)
        self._flows = kept
        for flow in arrived:
            own, other = ((flow.link, way) for way in (flow.upward, not flow.upward))
            if own in self._windows:
                self._windows[own].end(now)
                self._windows[other].note_activity(now + self.links[flow.link].delay_seconds)
        self._share(now)
        return [(self.links[f.link].delay_seconds, f.arrive) for f in arrived]

    def _advance(self, now: float) -> None:
        passed = now - self._last_time
        if passed > 0:
            for direction, speed in self._speeds().items():
                if direction in self._windows:
                    self._windows[direction].left = max(0.0, self._windows[direction].left - speed * passed)
            for flow in self._flows:
                flow.left = max(0.0, flow.left - flow.rate * passed)
        self._last_time = now

    def _rate(self, now: float, place: int, upward: bool) -> float:
        first = self.links[place].between[0] == self._server
        return self.links[place].rate_bytes(now, back=upward == first)

    def _fault_factor(self, place: int) -> float:
        return math.prod(self._faults[place].values())

    def _share(self, now: float) -> None:
        for upward in (True, False):
            flows = [f for f in self._flows if f.upward == upward and not f.through]
            flows_on: dict[int, int] = {}
            for flow in flows:
                flows_on[flow.link] = flows_on.get(flow.link, 0) + 1
            for flow in flows:
                shut = (flow.link, upward) in self._windows and self._windows[flow.link, upward].is_used_up
                flow.rate = self._rate(now, flow.link, upward) * self._fault_factor(flow.link) / flows_on[flow.link]
                flow.rate = 0.0 if shut else flow.rate
            if self._server_bytes_s < math.inf:
                _share_capacity(flows, self._server_bytes_s)
        for flow in self._flows:
            if flow.through:
                flow.left, flow.rate, flow.finish = 0.0, 0.0, math.inf
            elif flow.left <= 0:
                flow.finish = now
            else:
                flow.finish = now + flow.left / flow.rate if flow.rate > 0 else math.inf


def _share_capacity(flows: list[_Flow], capacity: float) -> None:
    """Max-min fairness: each flow gets an equal share of the rest, or what its own link allows."""
    waiting = len(flows)
    for flow in sorted(flows, key=lambda f: f.rate):
        flow.rate = min(flow.rate, capacity / waiting)
        capacity -= flow.rate
        waiting -= 1

"""WAN links: bandwidth, one-way delay, loss, and what they do over time.

A message is a flow of bytes. Flows in one direction of a link share it fairly; flows through the
server's network card share that too (max-min: a flow that its own link holds back leaves its share to
the others). The last byte arrives one delay after it left. Loss is modelled by what it does to TCP: a
connection gets at most MSS/RTT * sqrt(3/2)/sqrt(loss) (Mathis et al., 1997), CONNECTIONS of them
carry a message, and lost bytes are sent again. A cut link moves nothing; what is on its way goes on
when it heals. Messages of one direction arrive in the order in which they were sent, as on any stream.

A direction starts slowly, as TCP does (`windows`): in a round trip no more leaves than its window, which doubles while
it is the limit. A sender that was silent gets half of it back for every retransmission time-out that has passed, as
Linux does; who receives has spoken too, at the first byte (gRPC measures the line) and at the last (it is
acknowledged). `weightgrad validate` compares all this with real links. Bandwidth is what a stream gets, as iperf
measures it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

MSS_BYTES = 1460
CONNECTIONS = 4
CHUNK_BYTES = 1024 * 1024  # a message is spread over so many connections as it has chunks
FIRST_WINDOW_BYTES = 10 * 1448  # of a connection (RFC 6928)
LEAST_TIMEOUT_SECONDS = 0.2  # on top of the round trip
LEAST_QUEUE_SECONDS = 0.05  # what waits in front of a link; else a round trip's worth


@dataclass(frozen=True)
class Link:
    """Between the two named places. `trace` is [(second, bit/s), ...] from 0 on.

    `back_bit_s` is the bandwidth from the second to the first, where it differs.
    """

    between: tuple[str, str]
    bandwidth_bit_s: float
    delay_seconds: float
    loss: float = 0.0
    trace: tuple[tuple[float, float], ...] = ()
    back_bit_s: float | None = None

    def nominal_bit_s(self, now: float, *, back: bool = False) -> float:
        """What it carries at that time, without loss and faults."""
        rate = self.back_bit_s if back and self.back_bit_s is not None else self.bandwidth_bit_s
        for since, changed in self.trace:
            if since <= now:
                rate = changed
        return rate

    def next_change(self, now: float) -> float:
        """When the trace changes next."""
        return min((since for since, _ in self.trace if since > now), default=math.inf)

    def rate_bytes(self, now: float, *, back: bool = False) -> float:
        """Useful bytes a second for one message that has it to itself."""
        rate = self.nominal_bit_s(now, back=back) / 8
        if self.loss:
            round_trip = max(2 * self.delay_seconds, 1e-4)
            reachable = CONNECTIONS * MSS_BYTES / round_trip * math.sqrt(1.5 / self.loss)
            rate = min(rate, reachable) * (1 - self.loss)
        return rate


@dataclass
class Window:
    """What TCP lets one direction of a link send in a round trip."""

    round_trip: float
    size: float = 0.0
    trip: float = 0.0  # what it was as this round trip began
    left: float = math.inf  # of that, until
    until: float = -math.inf
    spoke: float = 0.0  # when something was last sent
    queued: float = 0.0  # seconds that its packets wait in front of the link, on average
    spread: float = 0.0  # what the time-out has on top: twice the first round trip, less with every other

    def __post_init__(self) -> None:
        self.spread = max(LEAST_TIMEOUT_SECONDS, 2 * self.round_trip)

    def speaks(self, now: float) -> None:
        """Something is sent, be it an acknowledgement: a sender that was silent for long starts lower."""
        timeout = self.round_trip + self.queued + self.spread
        halvings = math.ceil((now - self.spoke) / timeout) - 1
        if halvings > 0:
            self.size = math.ldexp(self.size, -halvings)
        self.spoke = max(self.spoke, now)

    def wakes(self, now: float, nbytes: int, rate: float) -> None:
        """Something is to be sent again."""
        self.speaks(now)
        first = FIRST_WINDOW_BYTES * min(CONNECTIONS, max(1, math.ceil(nbytes / CHUNK_BYTES)))
        self.size = max(first, self.size)
        self.queued = min(nbytes / rate, max(self.round_trip, LEAST_QUEUE_SECONDS)) / 2 if rate > 0 else 0.0
        if now >= self.until:
            self._turn(now, rate)

    def grows(self, now: float, rate: float) -> None:
        """It was the limit for a whole round trip."""
        self.size = 2 * self.trip
        self._turn(now, rate)

    def ends(self, now: float) -> None:
        """All has left: what was sent in this round trip will have been acknowledged before the next message."""
        self.spoke = now
        if self.left < math.inf:
            self.size = 2 * self.trip - self.left

    def _turn(self, now: float, rate: float) -> None:
        self.spread -= (self.spread - LEAST_TIMEOUT_SECONDS) / 4
        self.trip = self.size
        self.left = math.inf if self.size >= rate * self.round_trip else self.size
        self.until = now + self.round_trip

    @property
    def shut(self) -> bool:
        """Nothing more may leave until the round trip is over."""
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
    through: bool = False  # all of it has left; it waits for those sent before it


class Links:
    """All links to the server, and the flows on them. The driver calls `run` when `next_event` comes."""

    def __init__(self, server: str, links: list[Link], server_bit_s: float | None, *, windows: bool = True) -> None:
        self._server = server
        self.links = links
        self._to: dict[str, int] = {}
        for place, link in enumerate(links):
            if server in link.between:
                self._to[next(end for end in link.between if end != server)] = place
        self._card = math.inf if server_bit_s is None else server_bit_s / 8
        self._faults: list[dict[object, float]] = [{} for _ in links]  # by cause
        self._flows: list[_Flow] = []
        self._then = 0.0
        self._windows = {
            (place, upward): Window(2 * link.delay_seconds)
            for place, link in enumerate(links)
            for upward in (True, False)
            if windows and link.delay_seconds > 0
        }
        self.bytes = [[0, 0] for _ in links]  # towards the first and the second of `between`

    def place(self, first: str, second: str) -> int:
        """Index of the link between two places."""
        for number, link in enumerate(self.links):
            if set(link.between) == {first, second}:
                return number
        raise KeyError((first, second))

    def delay(self, site: str) -> float:
        """One-way delay between a site and the server."""
        return self.links[self._to[site]].delay_seconds

    def send(self, now: float, sender: str, receiver: str, nbytes: int, arrive: Callable[[], None]) -> None:
        """Put a message on its link; `arrive` when its last byte has left (the delay comes on top)."""
        upward = receiver == self._server
        place = self._to[sender if upward else receiver]
        self.bytes[place][self._side(place, receiver)] += nbytes
        self._advance(now)
        window = self._windows.get((place, upward))
        if window is not None and not any((f.link, f.upward) == (place, upward) for f in self._flows):
            window.wakes(now, nbytes, self._rate(now, place, upward))
            self._windows[place, not upward].speaks(now + self.links[place].delay_seconds)
        self._flows.append(_Flow(place, upward, float(nbytes), arrive, sender, receiver))
        self._share(now)

    def _side(self, place: int, receiver: str) -> int:
        return 0 if self.links[place].between[0] == receiver else 1

    def scale(self, now: float, place: int, factor: float, cause: object = None) -> None:
        """A fault: the link carries this share of what it should (0: cut; 1: this cause is over)."""
        self._advance(now)
        self._faults[place][cause] = factor
        self._share(now)

    def drop(self, now: float, end: str) -> None:
        """Whatever is on its way from or to this place is gone."""
        self._advance(now)
        for flow in self._flows:
            if end in (flow.sender, flow.receiver):  # what had not left yet never will
                self.bytes[flow.link][self._side(flow.link, flow.receiver)] -= int(flow.left)
        self._flows = [f for f in self._flows if end not in (f.sender, f.receiver)]
        self._share(now)

    def next_event(self, now: float) -> float:
        """When a flow ends or a trace changes."""
        if not self._flows:
            return math.inf
        used = {f.link for f in self._flows}
        changes = min((self.links[place].next_change(now) for place in used), default=math.inf)
        return min(min(f.finish for f in self._flows), changes, self._next_window(now))

    def _next_window(self, now: float) -> float:
        """When a window is used up, or one that is opens again."""
        due, speed = math.inf, self._speeds()
        for lane in {(f.link, f.upward) for f in self._flows if not f.through}:
            window = self._windows.get(lane)
            if window is not None and window.shut:
                due = min(due, max(now, window.until))
            elif window is not None and window.left < math.inf and speed.get(lane, 0.0) > 0:
                later = math.nextafter(now, math.inf)  # or what is left may be too little for the clock to move
                due = min(due, max(later, now + window.left / speed[lane]))
        return due

    def _speeds(self) -> dict[tuple[int, bool], float]:
        found: dict[tuple[int, bool], float] = {}
        for flow in self._flows:
            found[flow.link, flow.upward] = found.get((flow.link, flow.upward), 0.0) + flow.rate
        return found

    def run(self, now: float) -> list[tuple[float, Callable[[], None]]]:
        """The flows that have ended by now, each with the delay until it arrives."""
        self._advance(now)
        for (place, upward), window in self._windows.items():
            if window.shut and now >= window.until:
                window.grows(now, self._rate(now, place, upward))
        kept, arrived, behind = [], [], set()
        for flow in self._flows:
            flow.through = flow.through or flow.finish <= now
            lane = (flow.link, flow.upward)
            if flow.through and lane not in behind:
                arrived.append(flow)
            else:
                behind.add(lane)
                kept.append(flow)
        self._flows = kept
        for flow in arrived:
            own, other = ((flow.link, way) for way in (flow.upward, not flow.upward))
            if own in self._windows:
                self._windows[own].ends(now)
                self._windows[other].speaks(now + self.links[flow.link].delay_seconds)
        self._share(now)
        return [(self.links[f.link].delay_seconds, f.arrive) for f in arrived]

    def _advance(self, now: float) -> None:
        passed = now - self._then
        if passed > 0:
            for lane, speed in self._speeds().items():
                if lane in self._windows:
                    self._windows[lane].left = max(0.0, self._windows[lane].left - speed * passed)
            for flow in self._flows:
                flow.left = max(0.0, flow.left - flow.rate * passed)
        self._then = now

    def _rate(self, now: float, place: int, upward: bool) -> float:
        first = self.links[place].between[0] == self._server
        return self.links[place].rate_bytes(now, back=upward == first)

    def _left(self, place: int) -> float:
        return math.prod(self._faults[place].values())

    def _share(self, now: float) -> None:
        for upward in (True, False):
            flows = [f for f in self._flows if f.upward == upward and not f.through]
            crowd: dict[int, int] = {}
            for flow in flows:
                crowd[flow.link] = crowd.get(flow.link, 0) + 1
            for flow in flows:
                shut = (flow.link, upward) in self._windows and self._windows[flow.link, upward].shut
                flow.rate = self._rate(now, flow.link, upward) * self._left(flow.link) / crowd[flow.link]
                flow.rate = 0.0 if shut else flow.rate
            if self._card < math.inf:
                _fill(flows, self._card)
        for flow in self._flows:
            if flow.through:
                flow.left, flow.rate, flow.finish = 0.0, 0.0, math.inf
            elif flow.left <= 0:
                flow.finish = now
            else:
                flow.finish = now + flow.left / flow.rate if flow.rate > 0 else math.inf


def _fill(flows: list[_Flow], capacity: float) -> None:
    """Max-min fair: each gets an equal share of what is left, or what its own link allows."""
    waiting = len(flows)
    for flow in sorted(flows, key=lambda f: f.rate):
        flow.rate = min(flow.rate, capacity / waiting)
        capacity -= flow.rate
        waiting -= 1

"""The delay switch: a learning-free Ethernet switch in user space that holds every packet for its link's delay.

Where the kernel has no `netem`, this program sits in the `wan` namespace with a packet socket on every port. The fixed
address of a frame's destination, and the port it came in by, tell its direction of a link, and so its delay:

    due = max(arrival + delay ± jitter, due of the packet before it)          the maximum: nothing is reordered

Arrival is the kernel's time stamp, taken from a ring that the kernel writes into (PACKET_RX_RING), so a switch that
the scheduler kept waiting still sends in time what is not due yet. PACKET_VNET_HDR lets segments that TCP has not cut
yet (GSO) through in one piece: one packet for eleven. Loss is drawn per packet. A cut drops what is on its way.

Started by path (`python -I -S switch.py`): it imports the standard library only and is up in milliseconds. JSON lines
come in on stdin, and each gets one reply on stdout; the switch ends when told to, or with its stdin.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import mmap
import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from typing import Any

_AHEAD_S = 20e-6  # a packet may leave this much too early: less than the cost of a system call
_BATCH = 64  # packets from one port before the other ports have their turn
_MOST_BLOCKS = 64  # MB for the rings of all ports together; eight for a port are plenty
_REALTIME_PRIORITY, _SLICE_NS = 10, 100_000


class Lateness:
    """How much later than due packets leave: counts in bins of 10 µs, and the worst."""

    _BIN_S = 1e-5

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Reset all counts."""
        self._counts: dict[int, int] = {}
        self.packets, self.worst = 0, 0.0

    def note(self, seconds: float) -> None:
        """Count a packet that left so late; too early counts as in time."""
        place = max(int(seconds / self._BIN_S), 0)
        self._counts[place] = self._counts.get(place, 0) + 1
        self.packets += 1
        if seconds > self.worst:
            self.worst = seconds

    def quantile(self, share: float) -> float:
        """The lateness in seconds that this share of the packets did not exceed, up to one bin."""
        seen = 0
        for place in sorted(self._counts):
            seen += self._counts[place]
            if seen >= share * self.packets:
                return min((place + 1) * self._BIN_S, self.worst)
        return 0.0

    def summary(self) -> dict[str, float]:
        """Number of packets, p50, p99 and the worst, for statistics."""
        quantiles = {"p50": self.quantile(0.5), "p99": self.quantile(0.99)}
        return {"packets": self.packets, **quantiles, "worst": self.worst}


class Direction:
    """One direction of a link: its settings, the packets it holds back, and counts of what has passed."""

    __slots__ = ("bytes", "cut", "delay", "held", "jitter", "loss", "lost", "packets")

    def __init__(self, delay: float, jitter: float = 0.0, loss: float = 0.0) -> None:
        self.delay, self.jitter, self.loss, self.cut = delay, jitter, loss, False
        self.held: deque[tuple[float, bytes]] = deque()
        self.packets = self.bytes = self.lost = 0


class Schedule:
    """The switch without sockets and clocks: packets come in, and go out when they are due."""

    def __init__(self, directions: dict[tuple[int, int], Direction], draw: random.Random | None = None) -> None:
        self.directions = directions
        self._draw = (draw or random.Random()).random
        self._busy: dict[tuple[int, int], Direction] = {}

    def accept(self, arrived: float, pair: tuple[int, int], packet: bytes) -> None:
        """Take a packet from one port to another; without a link between them it is dropped."""
        direction = self.directions.get(pair)
        if direction is None:
            return
        if direction.cut or (direction.loss and self._draw() < direction.loss):
            direction.lost += 1
            return
        due = arrived + direction.delay
        if direction.jitter:
            due += (2 * self._draw() - 1) * direction.jitter
        if direction.held:
            due = max(due, direction.held[-1][0])
        else:
            self._busy[pair] = direction
        direction.held.append((due, packet))

    def take(self, now: float) -> list[tuple[int, float, bytes]]:
        """The packets that are due: port to send to, when it was due, and the packet; each direction stays in order."""
        out = []
        for pair, direction in list(self._busy.items()):
            held = direction.held
            while held and held[0][0] <= now:
                due, packet = held.popleft()
                direction.packets += 1
                direction.bytes += len(packet)
                out.append((pair[1], due, packet))
            if not held:
                del self._busy[pair]
        return out

    def next_due(self) -> float | None:
        """When the next packet is due; None if there is none."""
        return min((direction.held[0][0] for direction in self._busy.values()), default=None)

    def set(self, pair: tuple[int, int], change: dict[str, Any]) -> None:
        """Change delay, jitter or loss of the packets that come from now on; a cut also drops those on their way."""
        direction = self.directions[pair]
        for name in ("delay", "jitter", "loss", "cut"):
            if name in change:
                setattr(direction, name, change[name])
        if direction.cut:
            direction.lost += len(direction.held)
            direction.held.clear()
            self._busy.pop(pair, None)


class Port:
    """A packet socket on one interface; the constants are those of <linux/if_packet.h>."""

    _SOL_PACKET, _RX_RING, _STATISTICS, _VERSION = 263, 5, 6, 10
    _VNET_HDR, _QDISC_BYPASS, _IGNORE_OUTGOING, _TPACKET_V2 = 15, 20, 23, 1
    # A frame holds one packet of at most 16 KiB (the hosts' gso_max_size) and its headers.
    _FRAME, _BLOCK = 17 * 1024, 1 << 20
    _HEADER, _STATUS = struct.Struct("=IIIHHII"), struct.Struct("=I")  # tpacket2_hdr
    _VNET_BYTES = 10

    def __init__(self, name: str, blocks: int) -> None:
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # protocol 0: nothing before bind
        for option in (self._VNET_HDR, self._IGNORE_OUTGOING, self._QDISC_BYPASS):
            self.socket.setsockopt(self._SOL_PACKET, option, 1)
        self.socket.setsockopt(self._SOL_PACKET, self._VERSION, self._TPACKET_V2)
        each = self._BLOCK // self._FRAME
        ring = struct.pack("=IIII", self._BLOCK, blocks, self._FRAME, each * blocks)
        self.socket.setsockopt(self._SOL_PACKET, self._RX_RING, ring)
        self._ring = mmap.mmap(self.socket.fileno(), self._BLOCK * blocks)
        self._frames = [b * self._BLOCK + f * self._FRAME for b in range(blocks) for f in range(each)]
        self._next = self._errors = 0
        self.socket.bind((name, 3))  # ETH_P_ALL
        self.socket.setblocking(False)

    def packets(self) -> list[tuple[float, bytes]]:
        """Packets that have come in: the kernel's time stamp (wall clock), and the packet with its virtio header."""
        found, ring = [], self._ring
        for _ in range(_BATCH):
            frame = self._frames[self._next]
            status, length, kept, mac, _, sec, nsec = self._HEADER.unpack_from(ring, frame)
            if not status & 1:  # the frame still belongs to the kernel
                break
            if kept == length:
                start = frame + mac
                found.append((sec + nsec * 1e-9, ring[start - self._VNET_BYTES : start + kept]))
            else:
                self._errors += 1
            self._STATUS.pack_into(ring, frame, 0)
            self._next = (self._next + 1) % len(self._frames)
        return found

    def send(self, packet: bytes) -> None:
        """Send a packet; a failure is counted."""
        try:
            self.socket.send(packet)
        except OSError:
            self._errors += 1

    def errors(self, *, clear: bool = False) -> int:
        """Packets that could not be sent, or found the ring full; the kernel resets its count when it is read."""
        _, drops = struct.unpack("=II", self.socket.getsockopt(self._SOL_PACKET, self._STATISTICS, 8))
        self._errors = 0 if clear else self._errors + drops
        return self._errors


class Switch:
    """The ports, the schedule, and the loop that serves them and the control channel."""

    def __init__(self, spec: dict[str, Any]) -> None:
        blocks = min(max(_MOST_BLOCKS // len(spec["ports"]), 1), 8)
        self.ports = [Port(name, blocks) for name, _ in spec["ports"]]
        self._place = {bytes.fromhex(mac.replace(":", "")): i for i, (_, mac) in enumerate(spec["ports"])}
        self.schedule = Schedule({(i, j): Direction(0.0) for i, j, _ in spec["directions"]})
        for i, j, settings in spec["directions"]:
            self.schedule.set((i, j), settings)
        self.lateness = Lateness()
        self._sockets = {port.socket: i for i, port in enumerate(self.ports)}
        self._typed = b""

    def serve(self) -> None:
        """Forward packets until told to end."""
        waits = [*self._sockets, sys.stdin.fileno()]
        while True:
            self._send()
            due = self.schedule.next_due()
            pause = 1.0 if due is None else min(max(due - _AHEAD_S - time.monotonic(), 0.0), 1.0)
            ready, _, _ = select.select(waits, [], [], pause)
            for one in ready:
                if isinstance(one, int):
                    if not self._handle_requests():
                        return
                else:
                    self._receive(self._sockets[one])

    def _receive(self, place: int) -> None:
        arrived = self.ports[place].packets()
        ahead, now = time.time() - time.monotonic(), time.monotonic()
        for stamp, packet in arrived:
            when = min(max(stamp - ahead, now - 0.5), now)  # bounded, in case the wall clock was set
            target = self._place.get(packet[10:16])  # after the virtio header
            if target is not None:
                self.schedule.accept(when, (place, target), packet)

    def _send(self) -> None:
        clock, late = time.monotonic, self.lateness.note
        for port, due, packet in self.schedule.take(clock() + _AHEAD_S):
            self.ports[port].send(packet)
            late(clock() - due)

    def _handle_requests(self) -> bool:
        got = os.read(sys.stdin.fileno(), 65536)
        *lines, self._typed = (self._typed + got).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "end" in request:
                return False
            reply({**self._do(request), "id": request["id"]})
        return bool(got)

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        for i, j, settings in request.get("set", ()):
            self.schedule.set((i, j), settings)
        found: dict[str, Any] = {}
        if request.get("stats"):
            for (i, j), direction in self.schedule.directions.items():
                size = direction.bytes - Port._VNET_BYTES * direction.packets
                found[f"{i}>{j}"] = {"packets": direction.packets, "bytes": size, "lost": direction.lost}
            errors = sum(port.errors() for port in self.ports)
            found = {"directions": found, "lateness": self.lateness.summary(), "errors": errors}
        if request.get("reset_stats"):
            self.lateness.clear()
            for port in self.ports:
                port.errors(clear=True)
        return found


def reply(value: dict[str, Any]) -> None:
    """Write one line to the process that started the switch."""
    os.write(sys.stdout.fileno(), json.dumps(value).encode() + b"\n")


def ask_for_short_slices() -> None:
    """Ask for short time slices: kernels from 6.12 on run such tasks sooner (EEVDF), others ignore it."""
    number = {"x86_64": 314, "aarch64": 274}.get(os.uname().machine)
    if number is not None and sys.platform == "linux":
        # struct sched_attr: size, policy (normal), flags, nice, priority, runtime in ns, deadline, period
        attributes = struct.pack("=IIQiIQQQ", 48, 0, 0, 0, 0, _SLICE_NS, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)


def main() -> None:
    """Read ports, directions and the attributes for real-time priority from the first line on stdin, then serve."""
    spec = json.loads(sys.stdin.readline())
    ctypes.CDLL(None).prctl(29, ctypes.c_ulong(1), 0, 0, 0)  # PR_SET_TIMERSLACK: 1 ns, not 50 µs
    ask_for_short_slices()
    realtime = False
    if spec["realtime"]:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_REALTIME_PRIORITY))
            realtime = True
    switch = Switch(spec)
    gc.collect()
    gc.disable()  # nothing here makes cycles, and a collection would make packets late
    reply({"realtime": realtime, "id": spec["id"]})
    switch.serve()


if __name__ == "__main__":
    main()

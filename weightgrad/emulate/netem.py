"""Delay by the kernel's `netem`, where it has one: the `wan` namespace becomes a bridge that delays towards each port.

On the way out to gateway j there is a class for every source i, and in it a netem with the link's delay, jitter and
loss. `rate` is there for jitter only: with it, netem lets no packet overtake the one before.
"""

from __future__ import annotations

import json

from weightgrad.emulate.delays import Delay, DelayStats
from weightgrad.emulate.lab import Lab
from weightgrad.emulate.plan import Step, subnet
from weightgrad.emulate.topology import Topology, WanLink
from weightgrad.errors import EmulatorError

_SMALL_PACKET_BYTES = 66  # an acknowledgement


def available(lab: Lab) -> bool:
    """Whether this kernel knows netem; tried on the `lo` of the wan, which nobody uses."""
    try:
        lab.apply([{"tc": ["qdisc add dev lo root netem delay 1ms", "qdisc del dev lo root"]}])
    except EmulatorError:
        return False
    return True


def netem(link: WanLink, sender: str, *, cut: bool) -> str:
    """The settings of one direction."""
    jitter = f" {1e6 * link.jitter_seconds:.0f}us rate 10gbit" if link.jitter_seconds else ""
    loss = 1.0 if cut else link.loss
    held = link.rate_bit_s(sender) / 8 * (link.delay_seconds + link.jitter_seconds) / _SMALL_PACKET_BYTES
    lost = f" loss {100 * loss:.6f}%" if loss else ""
    return f"netem limit {1000 + int(held)} delay {1e6 * link.delay_seconds:.0f}us{jitter}{lost}"


class NetemDelay(Delay):
    """The bridge and its queues."""

    name = "netem"

    def __init__(self, lab: Lab, topology: Topology) -> None:
        self._lab, self._topology = lab, topology

    def open(self) -> None:
        """Bridge, classes, filters and netems."""
        places = range(len(self._topology.hosts))
        bridge = ["link add name bridge0 type bridge forward_delay 0 mcast_snooping 0", "link set bridge0 up"]
        tc = [f"qdisc add dev w{j} root handle 1: htb default 0" for j in places]
        for sender, receiver, link in self._topology.directions():
            i, j = self._topology.place(sender), self._topology.place(receiver)
            tc.append(
                f"class add dev w{j} parent 1: classid 1:{i + 1:x} htb rate 100gbit burst 1mb cburst 1mb quantum 60000"
            )
            tc.append(self._line("add", link, sender, receiver, cut=False))
            match = f"u32 match ip src {subnet(i)} flowid 1:{i + 1:x}"
            tc.append(f"filter add dev w{j} parent 1: protocol ip prio 1 {match}")
        self._lab.apply([Step(ip=[*bridge, *(f"link set w{i} master bridge0" for i in places)], tc=tc)])

    def _line(self, verb: str, link: WanLink, sender: str, receiver: str, *, cut: bool) -> str:
        i, j = self._topology.place(sender), self._topology.place(receiver)
        where = f"dev w{j} parent 1:{i + 1:x} handle {self._handle(i)}"
        return f"qdisc {verb} {where} {netem(link, sender, cut=cut)}"

    @staticmethod
    def _handle(i: int) -> str:
        return f"{i + 0x100:x}:"

    def set(self, link: WanLink, *, cut: bool) -> None:
        """`change` forgets what is not said again, so all of it is."""
        a, b = link.between
        lines = [self._line("change", link, one, other, cut=cut) for one, other in ((a, b), (b, a))]
        self._lab.apply([Step(tc=lines)])

    def stats(self) -> DelayStats:
        """What the netems have dropped."""
        lost = {}
        for sender, receiver, _ in self._topology.directions():
            lost[self._topology.place(sender), self._topology.place(receiver)] = 0
        places = range(len(self._topology.hosts))
        shown = self._lab.apply([Step(options=["-s", "-j"], tc=[f"qdisc show dev w{j}"]) for j in places])
        for j, out in enumerate(shown):
            drops = {one.get("handle"): one["drops"] for one in json.loads(out)}
            lost.update({(i, to): drops[self._handle(i)] for i, to in lost if to == j})
        return DelayStats(lost)

    def fresh(self) -> None:
        """The kernel keeps no account of lateness."""

    def describe(self) -> dict[str, object]:
        """The kernel does it."""
        return {"delay": self.name, "realtime": False}

    def close(self) -> None:
        """It goes with its namespace."""

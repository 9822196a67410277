"""What makes emulated links far: delay, jitter, loss and cuts, all in the `wan` namespace.

`NetemDelay` uses the kernel's `netem`, where there is one: the `wan` namespace becomes a bridge that delays towards
each port. On the way out to gateway j there is a class for every source i, and in it a netem with the link's delay,
jitter and loss. Its `rate` is there for jitter only: with a rate, netem lets no packet overtake the one before.
`SwitchDelay` is for kernels without netem: a switch in user space (switch.py) holds the packets back.
"""

from __future__ import annotations

import json
import subprocess
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from weightgrad.errors import EmulatorError, NamespacesRefusedError
from weightgrad.lab.emulate.namespaces import HERE, PYTHON, ControlChannel, Namespaces
from weightgrad.lab.emulate.plan import Step, mac, subnet
from weightgrad.lab.emulate.stats import Lateness
from weightgrad.lab.emulate.topology import Topology, WanLink

_SMALL_PACKET_BYTES = 66  # an acknowledgement


@dataclass(frozen=True)
class DelayStats:
    """Lost packets by (from, to) as host numbers; lateness and the switch's own errors where they are known."""

    lost: dict[tuple[int, int], int]
    lateness: Lateness | None = None
    errors: int = 0


class Delay(ABC):
    """Delays packets between the interfaces w0, w1, ... of the `wan` namespace; opened after they exist."""

    name: str

    @abstractmethod
    def open(self) -> None:
        """Start to forward packets."""

    @abstractmethod
    def set(self, link: WanLink, *, cut: bool) -> None:
        """Apply the values of a link to both directions; a cut link passes nothing."""

    @abstractmethod
    def stats(self) -> DelayStats:
        """Losses since the start; lateness and errors since `reset_stats`."""

    @abstractmethod
    def reset_stats(self) -> None:
        """Count lateness and errors from now on."""

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """A description for the event log."""

    @abstractmethod
    def close(self) -> None:
        """Stop forwarding."""


def netem_available(namespaces: Namespaces) -> bool:
    """Whether this kernel has netem; tried on the unused `lo` of the `wan` namespace."""
    try:
        namespaces.apply([{"tc": ["qdisc add dev lo root netem delay 1ms", "qdisc del dev lo root"]}])
    except EmulatorError:
        return False
    return True


def netem_settings(link: WanLink, sender: str, *, cut: bool) -> str:
    """The netem settings of one direction of a link."""
    jitter = f" {1e6 * link.jitter_seconds:.0f}us rate 10gbit" if link.jitter_seconds else ""
    loss = 1.0 if cut else link.loss
    held = link.rate_bit_s(sender) / 8 * (link.delay_seconds + link.jitter_seconds) / _SMALL_PACKET_BYTES
    lost = f" loss {100 * loss:.6f}%" if loss else ""
    return f"netem limit {1000 + int(held)} delay {1e6 * link.delay_seconds:.0f}us{jitter}{lost}"


class NetemDelay(Delay):
    """A bridge whose queues are netems."""

    name = "netem"

    def __init__(self, namespaces: Namespaces, topology: Topology) -> None:
        self._namespaces, self._topology = namespaces, topology

    def open(self) -> None:
        """Make bridge, classes, filters and netems."""
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
        self._namespaces.apply([Step(ip=[*bridge, *(f"link set w{i} master bridge0" for i in places)], tc=tc)])

    def _line(self, verb: str, link: WanLink, sender: str, receiver: str, *, cut: bool) -> str:
        i, j = self._topology.place(sender), self._topology.place(receiver)
        where = f"dev w{j} parent 1:{i + 1:x} handle {self._handle(i)}"
        return f"qdisc {verb} {where} {netem_settings(link, sender, cut=cut)}"

    @staticmethod
    def _handle(i: int) -> str:
        return f"{i + 0x100:x}:"

    def set(self, link: WanLink, *, cut: bool) -> None:
        """Change both directions; every value is given, because `change` resets those that are not."""
        a, b = link.between
        lines = [self._line("change", link, one, other, cut=cut) for one, other in ((a, b), (b, a))]
        self._namespaces.apply([Step(tc=lines)])

    def stats(self) -> DelayStats:
        """Packets that the netems have dropped."""
        lost = {}
        for sender, receiver, _ in self._topology.directions():
            lost[self._topology.place(sender), self._topology.place(receiver)] = 0
        places = range(len(self._topology.hosts))
        shown = self._namespaces.apply([Step(options=["-s", "-j"], tc=[f"qdisc show dev w{j}"]) for j in places])
        for j, out in enumerate(shown):
            drops = {one.get("handle"): one["drops"] for one in json.loads(out)}
            lost.update({(i, to): drops[self._handle(i)] for i, to in lost if to == j})
        return DelayStats(lost)

    def reset_stats(self) -> None:
        """Nothing to do: the kernel does not record lateness."""

    def describe(self) -> dict[str, object]:
        """A description for the event log."""
        return {"delay": self.name, "realtime": False}

    def close(self) -> None:
        """Nothing to do: the bridge goes with its namespace."""


class SwitchDelay(Delay):
    """A process in the `wan` namespace that holds packets back: switch.py."""

    name = "switch"

    def __init__(self, namespaces: Namespaces, topology: Topology, realtime: bool | None) -> None:
        self._namespaces, self._topology, self._asked = namespaces, topology, realtime
        self._switch: ControlChannel | None = None
        self.realtime = False

    def open(self) -> None:
        """Start the switch, with real-time priority if that is allowed."""
        process = self._namespaces.popen(
            "", "", [*PYTHON, str(HERE / "switch.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self._switch = ControlChannel(process, "the delay switch")
        places = range(len(self._topology.hosts))
        ports = [[f"w{i}", mac(0, i)] for i in places]
        directions = [direction for link in self._topology.links for direction in self._directions(link, cut=False)]
        realtime = self._asked if self._asked is not None else not self._namespaces.rootless
        try:
            ready = self._switch.request({"ports": ports, "directions": directions, "realtime": realtime})
        except EmulatorError as error:
            raise NamespacesRefusedError(
                f"namespaces are allowed, but packet sockets in them are not: {error}"
            ) from error
        self.realtime = ready["realtime"]
        if self._asked and not self.realtime:
            raise EmulatorError(
                "realtime=True: this system allows the delay switch no real-time priority; leave it out"
            )

    def _directions(self, link: WanLink, *, cut: bool) -> list[list[object]]:
        settings = {"delay": link.delay_seconds, "jitter": link.jitter_seconds, "loss": link.loss, "cut": cut}
        a, b = (self._topology.place(end) for end in link.between)
        return [[a, b, settings], [b, a, settings]]

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._switch is not None
        return self._switch.request(request)

    def set(self, link: WanLink, *, cut: bool) -> None:
        """Change both directions at the same time."""
        self._ask({"set": self._directions(link, cut=cut)})

    def stats(self) -> DelayStats:
        """The counters of the switch."""
        found = self._ask({"stats": True})
        lost = {}
        for direction, counts in found["directions"].items():
            a, b = direction.split(">")
            lost[int(a), int(b)] = counts["lost"]
        return DelayStats(lost, Lateness(**found["lateness"]), found["errors"])

    def reset_stats(self) -> None:
        """Count lateness and errors from now on."""
        self._ask({"reset_stats": True})

    def describe(self) -> dict[str, object]:
        """A description for the event log."""
        return {"delay": self.name, "realtime": self.realtime}

    def close(self) -> None:
        """End the switch."""
        if self._switch is not None:
            self._switch.close()
            self._switch = None

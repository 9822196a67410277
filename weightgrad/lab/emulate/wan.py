"""An emulated network of namespaces on one Linux machine: real TCP over real queues."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from weightgrad.errors import EmulatorError, NamespacesRefusedError, TopologyError
from weightgrad.lab.emulate import plan
from weightgrad.lab.emulate.delay import Delay, NetemDelay, SwitchDelay, netem_available
from weightgrad.lab.emulate.namespaces import Namespaces
from weightgrad.lab.emulate.network import Host, Network
from weightgrad.lab.emulate.stats import PairStats, WanStats
from weightgrad.lab.emulate.topology import WanLink


class NamespaceHost(Host):
    """A host with a network namespace and a hostname of its own; the names of other hosts resolve."""

    def __init__(self, namespaces: Namespaces, name: str, place: int) -> None:
        super().__init__(name, plan.address(place))
        self._namespaces, self._net = namespaces, plan.host_net(place)

    def _popen(self, command: list[str], **keywords: Any) -> subprocess.Popen[Any]:
        path = (keywords.get("env") or os.environ).get("PATH")
        if "/" not in command[0] and shutil.which(command[0], path=path) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])  # as Popen does
        return self._namespaces.popen(self._net, self.name, command, **keywords)

    def pids(self) -> list[int]:
        """The PIDs of all processes on this host, as they are outside."""
        return self._namespaces.pids(self._net)

    def _kill_rest(self) -> None:
        self._namespaces.kill(self._net)


class Wan(Network):
    """Hosts and gateways as namespaces; for a user who is not root, inside a user namespace."""

    def __init__(
        self,
        hosts: Sequence[str],
        links: Iterable[WanLink],
        *,
        delay: str = "auto",
        congestion: str = "cubic",
        rootless: bool | None = None,
        realtime: bool | None = None,
    ) -> None:
        super().__init__(hosts, links)
        if delay not in ("auto", "netem", "switch"):
            raise TopologyError(f"delay is {delay!r}; wanted auto, netem or switch")
        self._kind, self._congestion, self._realtime = delay, congestion, realtime
        self._namespaces = Namespaces(os.geteuid() != 0 if rootless is None else rootless)
        self._hosts = {name: NamespaceHost(self._namespaces, name, i) for i, name in enumerate(self.hosts)}
        self._shaped: dict[tuple[str, str], WanLink] = {}
        self._delay: Delay | None = None

    @property
    def bound_seconds(self) -> float:
        """The lateness p99 up to which a run is trusted; smaller if the switch has real-time priority."""
        return 0.002 if isinstance(self._delay, SwitchDelay) and self._delay.realtime else 0.008

    def open(self) -> None:
        """Make namespaces, interfaces, shaping and delay; about a third of a second for three hosts."""
        if self._delay is not None:
            return
        self._check_congestion()
        self._namespaces.open()
        try:
            self._namespaces.name_hosts({name: plan.address(i) for i, name in enumerate(self.hosts)})
            try:
                self._namespaces.apply(plan.build(self._topology, self._congestion))
                self._shaped = {link.between: link for link in self.links}
            except EmulatorError as error:
                raise NamespacesRefusedError(
                    f"namespaces are allowed, but not the interfaces in them: {error}"
                ) from error
            self._delay = self._choose_delay()
            self._delay.open()
        except BaseException:
            self.close()
            raise

    def _check_congestion(self) -> None:
        path = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
        known = path.read_text().split() if path.exists() else [self._congestion]
        if self._congestion not in known:
            raise TopologyError(f"congestion is {self._congestion!r}; this kernel has {', '.join(known)}")

    def _choose_delay(self) -> Delay:
        if self._kind != "switch":
            if netem_available(self._namespaces):
                return NetemDelay(self._namespaces, self._topology)
            if self._kind == "netem":
                raise EmulatorError("delay='netem': this kernel has none; use 'switch', or 'auto'")
        return SwitchDelay(self._namespaces, self._topology, self._realtime)

    @property
    def _opened(self) -> Delay:
        if self._delay is None:
            raise EmulatorError("the network is not open: use it in a `with` block")
        return self._delay

    def close(self) -> None:
        """End the switch, then the namespaces with everything in them."""
        if self._delay is not None:
            self._delay.close()
            self._delay = None
        self._namespaces.close()

    def host(self, name: str) -> Host:
        """A host by name."""
        self._topology.place(name)
        return self._hosts[name]

    def reach(self, sender: str, receiver: str, port: int) -> str:
        """The address of a port of a host.

        Raises:
            TopologyError: No link leads there.
        """
        if sender != receiver:
            self._topology.link(sender, receiver)
        return f"{plan.address(self._topology.place(receiver))}:{port}"

    def _apply(self, link: WanLink, *, cut: bool) -> None:
        self._opened.set(link, cut=cut)
        if self._shaped.get(link.between) != link:  # a cut does not change the gateways
            self._namespaces.apply(plan.reshape(self._topology, link))
            self._shaped[link.between] = link

    def stats(self) -> WanStats:
        """Counts from the queues of the gateways and from the delay."""
        delay = self._opened.stats()
        places = range(len(self.hosts))
        steps = [plan.Step(net=plan.gateway_net(i), options=["-s", "-j"], tc=["qdisc show dev wan0"]) for i in places]
        queues = [{queue["handle"]: queue for queue in json.loads(out)} for out in self._namespaces.apply(steps)]
        pairs = {}
        for sender, receiver, _ in self._topology.directions():
            i, j = self._topology.place(sender), self._topology.place(receiver)
            queue = queues[i][plan.leaf(j)]
            passed = (queue["bytes"], queue["packets"], queue["drops"])
            pairs[sender, receiver] = PairStats(*passed, lost=delay.lost.get((i, j), 0))
        return WanStats(pairs, delay.lateness, delay.errors)

    def reset_stats(self) -> None:
        """Count lateness from now on."""
        self._opened.reset_stats()

    def describe(self) -> dict[str, Any]:
        """A description of the network for the event log."""
        return {
            "kind": "namespaces, rootless" if self._namespaces.rootless else "namespaces, root",
            **self._opened.describe(),
            "congestion": self._congestion,
            "kernel": platform.release(),
            "links": [link.as_dict() for link in self.links],
        }

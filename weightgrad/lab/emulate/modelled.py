"""An emulated network without namespaces: hosts are plain processes on loopback, and relays model the links.

For machines that allow nothing else. Rate, delay, jitter and cuts act on the bytes of TCP streams; loss only lowers the
rate, by the simulator's formula. Whatever is measured here is to be marked "modelled". All hosts share the ports of one
machine: no two can listen on the same port, and only `reach` leads over a link.
"""

from __future__ import annotations

import os
import platform
import secrets
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

from weightgrad.errors import EmulatorError
from weightgrad.lab.emulate.check import LINE_BYTES, STREAM_BYTES
from weightgrad.lab.emulate.namespaces import HERE, PYTHON
from weightgrad.lab.emulate.network import Host, Network
from weightgrad.lab.emulate.reaper import kill_marked, mark, marked
from weightgrad.lab.emulate.relays import Relays
from weightgrad.lab.emulate.stats import Lateness, PairStats, WanStats
from weightgrad.lab.emulate.topology import WanLink
from weightgrad.lab.sim.links import Link

_LOOPBACK = "127.0.0.1"


class LoopbackHost(Host):
    """A host that is only a name, and the processes with its mark in their environment."""

    def __init__(self, token: str, name: str) -> None:
        super().__init__(name, _LOOPBACK)
        self._token = token

    def _popen(self, command: list[str], **keywords: Any) -> subprocess.Popen[Any]:
        given = keywords.pop("env", None)
        environment = {**(os.environ if given is None else given), **mark(self._token, self.name)}
        return subprocess.Popen(command, env=environment, **keywords)

    def pids(self) -> list[int]:
        """The PIDs of all processes of this host: those started here, and those with its mark."""
        own = {process.pid for process in self._started if process.poll() is None}
        return sorted(own | set(marked(self._token, self.name)))

    def _kill_rest(self) -> None:
        kill_marked(self._token, self.name)


class ModelledWan(Network):
    """A network with the interface of `Wan` that works on any machine."""

    def __init__(self, hosts: Sequence[str], links: Iterable[WanLink]) -> None:
        super().__init__(hosts, links)
        self._token = secrets.token_hex(8)
        self._hosts = {name: LoopbackHost(self._token, name) for name in self.hosts}
        self._relays: Relays | None = None
        self._reaper: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        """Start the relays, and a reaper that cleans up if this process is killed."""
        if self._relays is not None:
            return
        self._relays = Relays()
        for link in self.links:
            self._apply(link, cut=False)
        if hasattr(os, "pidfd_open"):
            owner = os.pidfd_open(os.getpid())
            command = [*PYTHON, str(HERE / "reaper.py"), self._token, str(owner)]
            self._reaper = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[owner], start_new_session=True)
            os.close(owner)

    def close(self) -> None:
        """Kill all processes of all hosts, then end the relays."""
        for host in self._hosts.values():
            host.kill_all()
        if self._reaper is not None:
            self._reaper.kill()
            self._reaper.communicate()
            self._reaper = None
        if self._relays is not None:
            self._relays.close()
            self._relays = None

    @property
    def bound_seconds(self) -> float:
        """The lateness p99 up to which a run is trusted: relays have no priority."""
        return 0.008

    @property
    def _opened(self) -> Relays:
        if self._relays is None:
            raise EmulatorError("the network is not open: use it in a `with` block")
        return self._relays

    def host(self, name: str) -> Host:
        """One of the hosts."""
        self._topology.place(name)
        return self._hosts[name]

    def reach(self, sender: str, receiver: str, port: int) -> str:
        """The address of a relay of the link between two hosts."""
        if sender == receiver:
            self._topology.place(sender)
            return f"{_LOOPBACK}:{port}"
        self._topology.link(sender, receiver)
        return f"{_LOOPBACK}:{self._opened.port(sender, receiver, port)}"

    def _apply(self, link: WanLink, *, cut: bool) -> None:
        for sender, receiver in (link.between, link.between[::-1]):
            line = Link(link.between, link.rate_bit_s(sender), link.delay_seconds, link.loss)
            rate = line.rate_bytes(0.0) * STREAM_BYTES / LINE_BYTES
            self._opened.set(sender, receiver, rate, link.delay_seconds, link.jitter_seconds, cut=cut)

    def stats(self) -> WanStats:
        """Bytes and packets as a line would count them; lateness is that of the worst link."""
        pairs, late = {}, []
        for ends, (count, lateness) in self._opened.stats().items():
            packets = -(-count // STREAM_BYTES)
            pairs[ends] = PairStats(count + packets * (LINE_BYTES - STREAM_BYTES), packets, 0, 0)
            late.append(lateness)
        total = sum(int(link["packets"]) for link in late)
        worst = (max((link[name] for link in late), default=0.0) for name in ("p50", "p99", "worst"))
        return WanStats(pairs, Lateness(total, *worst))

    def reset_stats(self) -> None:
        """Count lateness from now on."""
        self._opened.reset_stats()

    def describe(self) -> dict[str, Any]:
        """A description of the network for the event log."""
        return {
            "kind": "modelled",
            "delay": "relay",
            "realtime": False,
            "congestion": None,
            "kernel": platform.release(),
            "links": [link.as_dict() for link in self.links],
        }

"""A wide area network without namespaces: hosts are plain processes on loopback, links are modelled by relays.

For machines that allow nothing else. Rate, delay, jitter and cuts act on the bytes of TCP streams; of loss there is
only what it leaves of the rate, by the simulator's formula. Whatever is measured here is to be marked "modelled".
Ports are one machine's: no two hosts can listen on the same one, and only `reach` leads over a link.
"""

from __future__ import annotations

import os
import platform
import secrets
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

from weightgrad.emulate.check import LINE_BYTES, STREAM_BYTES
from weightgrad.emulate.janitor import kill_marked, mark, marked
from weightgrad.emulate.lab import HERE, PYTHON
from weightgrad.emulate.network import Host, Network
from weightgrad.emulate.relays import Relays
from weightgrad.emulate.stats import Lateness, PairStats, WanStats
from weightgrad.emulate.topology import WanLink
from weightgrad.errors import EmulatorError
from weightgrad.sim.links import Link

_LOOPBACK = "127.0.0.1"


class LoopbackHost(Host):
    """A name, and the processes that bear its mark."""

    def __init__(self, token: str, name: str) -> None:
        super().__init__(name, _LOOPBACK)
        self._token = token

    def _popen(self, command: list[str], **keywords: Any) -> subprocess.Popen[Any]:
        given = keywords.pop("env", None)
        environment = {**(os.environ if given is None else given), **mark(self._token, self.name)}
        return subprocess.Popen(command, env=environment, **keywords)

    def pids(self) -> list[int]:
        """By their mark, and what we started ourselves."""
        own = {one.pid for one in self._started if one.poll() is None}
        return sorted(own | set(marked(self._token, self.name)))

    def _kill_rest(self) -> None:
        kill_marked(self._token, self.name)


class ModelledWan(Network):
    """The same interface as `Wan`, on any machine."""

    def __init__(self, hosts: Sequence[str], links: Iterable[WanLink]) -> None:
        super().__init__(hosts, links)
        self._token = secrets.token_hex(8)
        self._places = {name: LoopbackHost(self._token, name) for name in self.hosts}
        self._relays: Relays | None = None
        self._janitor: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        """Start the relays' thread, and the janitor who cleans up should we be killed."""
        if self._relays is not None:
            return
        self._relays = Relays()
        for link in self.links:
            self._follow(link, cut=False)
        if hasattr(os, "pidfd_open"):
            owner = os.pidfd_open(os.getpid())
            command = [*PYTHON, str(HERE / "janitor.py"), self._token, str(owner)]
            self._janitor = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[owner], start_new_session=True)
            os.close(owner)

    def close(self) -> None:
        """All processes of all hosts, then the relays."""
        for place in self._places.values():
            place.kill_all()
        if self._janitor is not None:
            self._janitor.kill()
            self._janitor.communicate()
            self._janitor = None
        if self._relays is not None:
            self._relays.close()
            self._relays = None

    @property
    def bound_seconds(self) -> float:
        """The relays wait for their turn like everybody."""
        return 0.008

    @property
    def _opened(self) -> Relays:
        if self._relays is None:
            raise EmulatorError("the network is not open: use it in a `with` block")
        return self._relays

    def host(self, name: str) -> Host:
        """One of the hosts."""
        self._topology.place(name)
        return self._places[name]

    def reach(self, sender: str, receiver: str, port: int) -> str:
        """A relay of their link; raises if there is none."""
        if sender == receiver:
            self._topology.place(sender)
            return f"{_LOOPBACK}:{port}"
        self._topology.link(sender, receiver)
        return f"{_LOOPBACK}:{self._opened.port(sender, receiver, port)}"

    def _follow(self, link: WanLink, *, cut: bool) -> None:
        for sender, receiver in (link.between, link.between[::-1]):
            line = Link(link.between, link.rate_bit_s(sender), link.delay_seconds, link.loss)
            rate = line.rate_bytes(0.0) * STREAM_BYTES / LINE_BYTES
            self._opened.set(sender, receiver, rate, link.delay_seconds, link.jitter_seconds, cut=cut)

    def stats(self) -> WanStats:
        """Bytes and packets as the line would count them; of lateness, the quantiles of the worst link."""
        pairs, late = {}, []
        for ends, (count, lateness) in self._opened.lanes().items():
            packets = -(-count // STREAM_BYTES)
            pairs[ends] = PairStats(count + packets * (LINE_BYTES - STREAM_BYTES), packets, 0, 0)
            late.append(lateness)
        total = sum(int(one["packets"]) for one in late)
        worst = (max((one[name] for one in late), default=0.0) for name in ("p50", "p99", "worst"))
        return WanStats(pairs, Lateness(total, *worst))

    def fresh(self) -> None:
        """Lateness counts from here."""
        self._opened.fresh()

    def describe(self) -> dict[str, Any]:
        """What it is made of."""
        return {
            "kind": "modelled",
            "delay": "relay",
            "realtime": False,
            "congestion": None,
            "kernel": platform.release(),
            "links": [link.as_dict() for link in self.links],
        }

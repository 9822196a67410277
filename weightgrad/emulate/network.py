"""The one interface of both emulators: hosts to run commands on, links to cut, and an honest account.

    with open_wan(["hub", "east"], [WanLink(("hub", "east"), 100e6, 0.04)]) as wan:
        server = wan.host("hub").popen(["serve", "--listen", "0.0.0.0:7443"])
        client = wan.host("east").popen(["train", "--server", wan.reach("east", "hub", 7443)])
        wan.cut("hub", "east")

A network exists from `open` (or entering `with`) to `close`. When it closes, or when the process that opened it ends
in whatever way, every process on its hosts is killed.
"""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from weightgrad.emulate.check import LinkCheck, check_links
from weightgrad.emulate.stats import Verdict, WanStats
from weightgrad.emulate.topology import Topology, WanLink
from weightgrad.errors import TopologyError

_Same = TypeVar("_Same", bound="Network")


class Host(ABC):
    """A place of the network where commands run."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._started: list[subprocess.Popen[Any]] = []

    def popen(self, command: Sequence[str], **keywords: Any) -> subprocess.Popen[Any]:
        """Start a command here; keywords as for `subprocess.Popen`, without `shell` and `executable`.

        Signals and exit codes are the command's own. Its children get no signals: see `kill_all`.
        """
        if isinstance(command, str) or not command or {"shell", "executable"} & keywords.keys():
            wanted = 'wanted a list, e.g. ["sh", "-c", "..."], without shell= and executable='
            raise TopologyError(f"{self.name}: cannot start {command!r}; {wanted}")
        process = self._popen([str(part) for part in command], **keywords)
        self._started = [*(one for one in self._started if one.poll() is None), process]
        return process

    @abstractmethod
    def _popen(self, command: list[str], **keywords: Any) -> subprocess.Popen[Any]:
        """Start it."""

    def run(self, command: Sequence[str], *, timeout: float | None = None, **keywords: Any) -> str:
        """What the command printed; raises `subprocess.CalledProcessError` if it failed."""
        keywords = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **keywords}
        with self.popen(command, **keywords) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, list(command), out, err)
        return str(out)

    @abstractmethod
    def pids(self) -> list[int]:
        """Every process here, whoever started it."""

    def kill_all(self) -> None:
        """A power cut: kill -9 of every process here, also of those in sessions of their own."""
        for one in self._started:  # first: some may be on their way in, where nobody else finds them
            one.kill()
        self._kill_rest()

    @abstractmethod
    def _kill_rest(self) -> None:
        """Every process that is here."""


class Network(ABC):
    """Hosts joined by links. `reason` says why this kind was chosen, if somebody chose."""

    def __init__(self, hosts: Sequence[str], links: Iterable[WanLink]) -> None:
        self._topology = Topology(hosts, links)
        self._cuts: set[frozenset[str]] = set()
        self._checked: tuple[LinkCheck, ...] = ()
        self.reason = ""

    def __enter__(self: _Same) -> _Same:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def open(self) -> None:
        """Make it; does nothing if it is open."""

    @abstractmethod
    def close(self) -> None:
        """Everything on it ends and goes away; does nothing if it is closed."""

    @property
    @abstractmethod
    def bound_seconds(self) -> float:
        """Lateness p99 up to which a run is believed."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Their names."""
        return self._topology.hosts

    @property
    def links(self) -> tuple[WanLink, ...]:
        """As they are now."""
        return self._topology.links

    @abstractmethod
    def host(self, name: str) -> Host:
        """One of the hosts."""

    @abstractmethod
    def reach(self, sender: str, receiver: str, port: int) -> str:
        """The address ("ip:port") by which the one host reaches that port of the other."""

    @abstractmethod
    def _follow(self, link: WanLink, *, cut: bool) -> None:
        """Make the link as it says."""

    def cut(self, first: str, second: str) -> None:
        """Nothing gets through, either way, and nobody is told; until `heal`."""
        link = self._topology.link(first, second)
        self._cuts.add(frozenset(link.between))
        self._follow(link, cut=True)

    def heal(self, first: str, second: str) -> None:
        """As it was before `cut`."""
        link = self._topology.link(first, second)
        self._cuts.discard(frozenset(link.between))
        self._follow(link, cut=False)

    def is_cut(self, first: str, second: str) -> bool:
        """Whether `cut` holds."""
        return frozenset(self._topology.link(first, second).between) in self._cuts

    def set_link(
        self,
        first: str,
        second: str,
        *,
        bandwidth_bit_s: float | None = None,
        back_bit_s: float | None = None,
        delay_seconds: float | None = None,
        jitter_seconds: float | None = None,
        loss: float | None = None,
    ) -> None:
        """Change a link in use. `bandwidth_bit_s` alone is for both ways; `back_bit_s` is from second to first."""
        link = self._topology.change(
            first,
            second,
            bandwidth_bit_s=bandwidth_bit_s,
            back_bit_s=back_bit_s,
            delay_seconds=delay_seconds,
            jitter_seconds=jitter_seconds,
            loss=loss,
        )
        self._follow(link, cut=frozenset(link.between) in self._cuts)

    @abstractmethod
    def stats(self) -> WanStats:
        """What has passed since the start, and how late it was since the last check or `fresh`."""

    @abstractmethod
    def fresh(self) -> None:
        """Lateness counts from here, for another run on this network; what `check` has found still holds."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What this network is, for the ledger."""

    def check(self) -> tuple[LinkCheck, ...]:
        """Measure every direction of every link, before a run: some seconds of full load."""
        self._checked = check_links(self)
        self.fresh()
        return self._checked

    def verdict(self) -> Verdict:
        """After a run: whether the links were what was asked for, all the time."""
        wrong = [str(one) for one in self._checked if not one.ok]
        if wrong:
            return Verdict(False, f"before the run, {'; '.join(wrong)}")
        stats = self.stats()
        if stats.lateness is None:
            return Verdict(True, "the kernel (netem) did the delay")
        passed = stats.lateness.packets
        if stats.errors > 1e-4 * passed:
            return Verdict(False, f"the switch had to drop {stats.errors} of {passed} packets: too much load")
        if stats.lateness.p99 > self.bound_seconds:
            return Verdict(False, f"too late, bound {1e3 * self.bound_seconds:g} ms: {stats.lateness}")
        return Verdict(True, f"late by {stats.lateness}")

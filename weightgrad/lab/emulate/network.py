"""The interface of both emulated networks: hosts to run commands on, links to cut, and statistics to trust or not.

    with open_wan(["hub", "east"], [WanLink(("hub", "east"), 100e6, 0.04)]) as wan:
        server = wan.host("hub").popen(["serve", "--listen", "0.0.0.0:7443"])
        client = wan.host("east").popen(["train", "--server", wan.reach("east", "hub", 7443)])
        wan.cut("hub", "east")

A network exists from `open` (or the start of `with`) to `close`. When it closes, or when the process that opened it
ends in whatever way, every process on its hosts is killed.
"""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from weightgrad.errors import TopologyError
from weightgrad.lab.emulate.check import LinkCheck, check_links
from weightgrad.lab.emulate.stats import Verdict, WanStats
from weightgrad.lab.emulate.topology import Topology, WanLink

_Same = TypeVar("_Same", bound="Network")


class Host(ABC):
    """A host of an emulated network, on which commands run."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._started: list[subprocess.Popen[Any]] = []

    def popen(self, command: Sequence[str], **keywords: Any) -> subprocess.Popen[Any]:
        """Start a command on this host.

        Signals and exit codes are the command's own. Its children get no signals: see `kill_all`.

        Args:
            command: The command and its arguments.
            **keywords: As for `subprocess.Popen`, without `shell` and `executable`.
        """
        if isinstance(command, str) or not command or {"shell", "executable"} & keywords.keys():
            wanted = 'wanted a list, e.g. ["sh", "-c", "..."], without shell= and executable='
            raise TopologyError(f"{self.name}: cannot start {command!r}; {wanted}")
        process = self._popen([str(part) for part in command], **keywords)
        self._started = [*(started for started in self._started if started.poll() is None), process]
        return process

    @abstractmethod
    def _popen(self, command: list[str], **keywords: Any) -> subprocess.Popen[Any]:
        """Start a command."""

    def run(self, command: Sequence[str], *, timeout: float | None = None, **keywords: Any) -> str:
        """Run a command and return what it printed.

        Raises:
            subprocess.CalledProcessError: The command failed.
        """
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
        """The PIDs of all processes on this host, whoever started them."""

    def kill_all(self) -> None:
        """Kill (-9) every process on this host, as a power cut would."""
        for process in self._started:  # first, because some may not have entered the host yet
            process.kill()
        self._kill_rest()

    @abstractmethod
    def _kill_rest(self) -> None:
        """Kill every process that is on this host."""


class Network(ABC):
    """Hosts joined by links. `reason` says why `open_wan` chose this kind."""

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
        """Open the network; does nothing if it is open."""

    @abstractmethod
    def close(self) -> None:
        """End all processes and remove the network; does nothing if it is closed."""

    @property
    @abstractmethod
    def bound_seconds(self) -> float:
        """The lateness p99 up to which a run is trusted."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts."""
        return self._topology.hosts

    @property
    def links(self) -> tuple[WanLink, ...]:
        """The links as they are now."""
        return self._topology.links

    @abstractmethod
    def host(self, name: str) -> Host:
        """A host by name."""

    @abstractmethod
    def reach(self, sender: str, receiver: str, port: int) -> str:
        """The address ("ip:port") at which one host reaches a port of another."""

    @abstractmethod
    def _apply(self, link: WanLink, *, cut: bool) -> None:
        """Give the link its present values."""

    def cut(self, first: str, second: str) -> None:
        """Cut a link: until `heal`, packets are lost silently in both directions."""
        link = self._topology.link(first, second)
        self._cuts.add(frozenset(link.between))
        self._apply(link, cut=True)

    def heal(self, first: str, second: str) -> None:
        """End a cut."""
        link = self._topology.link(first, second)
        self._cuts.discard(frozenset(link.between))
        self._apply(link, cut=False)

    def is_cut(self, first: str, second: str) -> bool:
        """Whether the link is cut."""
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
        """Change a link in use; None keeps a value.

        `bandwidth_bit_s` alone is for both directions; `back_bit_s` is from the second host to the first.
        """
        link = self._topology.change(
            first,
            second,
            bandwidth_bit_s=bandwidth_bit_s,
            back_bit_s=back_bit_s,
            delay_seconds=delay_seconds,
            jitter_seconds=jitter_seconds,
            loss=loss,
        )
        self._apply(link, cut=frozenset(link.between) in self._cuts)

    @abstractmethod
    def stats(self) -> WanStats:
        """What has passed since the start, and how late it was since the last `check` or `reset_stats`."""

    @abstractmethod
    def reset_stats(self) -> None:
        """Count lateness from now on, for another run; the results of `check` are kept."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """A description of the network for the event log."""

    def check(self) -> tuple[LinkCheck, ...]:
        """Measure every direction of every link before a run; takes some seconds of full load."""
        self._checked = check_links(self)
        self.reset_stats()
        return self._checked

    def verdict(self) -> Verdict:
        """After a run: whether the links were as asked for all the time."""
        wrong = [str(check) for check in self._checked if not check.ok]
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

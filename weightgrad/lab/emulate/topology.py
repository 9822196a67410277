"""Hosts and links of an emulated network: values that are checked when they are made."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from weightgrad.errors import TopologyError
from weightgrad.units import show_bit_s, show_seconds

MOST_HOSTS = 200
_NAME = re.compile(r"(?=.*\w)[\w.-]{1,63}")
_LEAST_BIT_S, _MOST_BIT_S, _MOST_DELAY_S = 1e3, 100e9, 60.0
_LEAST_QUEUE_S, _LEAST_QUEUE_BYTES, _LEAST_BURST_BYTES = 0.05, 64 * 1024, 15_140


@dataclass(frozen=True)
class WanLink:
    """A link between two hosts.

    Attributes:
        between: Names of the hosts.
        bandwidth_bit_s: Line rate from the first host to the second.
        delay_seconds: One-way delay.
        jitter_seconds: Largest deviation from the delay.
        loss: Fraction of packets that is dropped, in each direction.
        back_bit_s: Line rate from the second host to the first; None means the same.
    """

    between: tuple[str, str]
    bandwidth_bit_s: float
    delay_seconds: float
    jitter_seconds: float = 0.0
    loss: float = 0.0
    back_bit_s: float | None = None

    def __post_init__(self) -> None:
        if len(self.between) != 2 or self.between[0] == self.between[1]:
            raise TopologyError(f"a link is between two different hosts, found {self.between!r}")
        for name in ("bandwidth_bit_s", "back_bit_s"):
            value = getattr(self, name)
            if not (value is None and name == "back_bit_s"):
                self._within(name, value, _LEAST_BIT_S, _MOST_BIT_S, "bit/s")
        self._within("delay_seconds", self.delay_seconds, 0.0, _MOST_DELAY_S, "s")
        self._within(
            "jitter_seconds", self.jitter_seconds, 0.0, self.delay_seconds, "s: it goes both ways from the delay"
        )
        self._within("loss", self.loss, 0.0, 1.0, "")
        if self.loss == 1.0:
            raise TopologyError(f"{self._named}: loss is 1; wanted less than 1; use `cut` to stop a link")

    @property
    def _named(self) -> str:
        return f"link {self.between[0]} - {self.between[1]}"

    def _within(self, name: str, value: object, least: float, most: float, unit: str) -> None:
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not (good and least <= value <= most):  # type: ignore[operator]
            raise TopologyError(f"{self._named}: {name} is {value!r}; wanted {least:g} to {most:g} {unit}".rstrip())

    def rate_bit_s(self, sender: str) -> float:
        """The line rate from one end to the other."""
        back = sender == self.between[1] and self.back_bit_s is not None
        return float(self.back_bit_s if back else self.bandwidth_bit_s)  # type: ignore[arg-type]

    @property
    def round_trip_seconds(self) -> float:
        """The round trip with empty queues."""
        return 2 * self.delay_seconds

    def queue_bytes(self, sender: str) -> int:
        """Size of the router's queue in front of the link: a round trip of bytes, at least 50 ms."""
        seconds = max(_LEAST_QUEUE_S, self.round_trip_seconds)
        return max(int(seconds * self.rate_bit_s(sender) / 8), _LEAST_QUEUE_BYTES)

    def burst_bytes(self, sender: str) -> int:
        """Bytes that may leave at once: those of a millisecond, at least ten packets."""
        return max(int(self.rate_bit_s(sender) / 8 / 1000), _LEAST_BURST_BYTES)

    def __str__(self) -> str:
        back = f" / {show_bit_s(self.back_bit_s)} back" if self.back_bit_s is not None else ""
        jitter = f" ± {show_seconds(self.jitter_seconds)}" if self.jitter_seconds else ""
        loss = f", {100 * self.loss:g} % loss" if self.loss else ""
        delay = show_seconds(self.delay_seconds)
        return f"{' - '.join(self.between)}: {show_bit_s(self.bandwidth_bit_s)}{back}, {delay}{jitter} one way{loss}"

    def as_dict(self) -> dict[str, Any]:
        """The link as plain values, for the event log."""
        return {**asdict(self), "between": list(self.between)}


class Topology:
    """The hosts in order, and the links between them as they are now."""

    def __init__(self, hosts: Sequence[str], links: Iterable[WanLink]) -> None:
        self.hosts = tuple(hosts)
        for name in self.hosts:
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise TopologyError(f"host {name!r}: wanted up to 63 letters, digits, '-', '_' and '.'")
        if len(set(self.hosts)) != len(self.hosts):
            raise TopologyError(f"hosts are named twice: {', '.join(self.hosts)}")
        if not 1 <= len(self.hosts) <= MOST_HOSTS:
            raise TopologyError(f"{len(self.hosts)} hosts; wanted 1 to {MOST_HOSTS}")
        self._links: dict[frozenset[str], WanLink] = {}
        for link in links:
            for end in link.between:
                self.place(end)
            if frozenset(link.between) in self._links:
                raise TopologyError(f"{' - '.join(link.between)}: there are two links between them; wanted one")
            self._links[frozenset(link.between)] = link

    @property
    def links(self) -> tuple[WanLink, ...]:
        """The links as they are now."""
        return tuple(self._links.values())

    def place(self, host: str) -> int:
        """The number of a host."""
        if host not in self.hosts:
            raise TopologyError(f"no host is named {host!r}; there are {', '.join(self.hosts)}")
        return self.hosts.index(host)

    def link(self, first: str, second: str) -> WanLink:
        """The link between two hosts, in either order.

        Raises:
            TopologyError: There is none.
        """
        self.place(first), self.place(second)
        found = self._links.get(frozenset((first, second)))
        if found is None:
            joined = ", ".join(" - ".join(link.between) for link in self.links) or "none"
            raise TopologyError(f"{first} and {second} are not joined by a link; there are: {joined}")
        return found

    def directions(self) -> list[tuple[str, str, WanLink]]:
        """Every direction of every link: (sender, receiver, link)."""
        ends = [(*link.between, link) for link in self.links]
        return [direction for a, b, link in ends for direction in ((a, b, link), (b, a, link))]

    def change(
        self,
        first: str,
        second: str,
        *,
        bandwidth_bit_s: float | None,
        back_bit_s: float | None,
        delay_seconds: float | None,
        jitter_seconds: float | None,
        loss: float | None,
    ) -> WanLink:
        """Change a link; None keeps a value. One rate is for both directions, two are there and back."""
        link = self.link(first, second)
        if bandwidth_bit_s is None and back_bit_s is not None:
            bandwidth_bit_s = link.rate_bit_s(first)
        if bandwidth_bit_s is not None:
            rates = (bandwidth_bit_s, back_bit_s)
            if back_bit_s is not None and first != link.between[0]:
                rates = (back_bit_s, bandwidth_bit_s)
            link = replace(link, bandwidth_bit_s=rates[0], back_bit_s=rates[1])
        rest = {"delay_seconds": delay_seconds, "jitter_seconds": jitter_seconds, "loss": loss}
        link = replace(link, **{name: value for name, value in rest.items() if value is not None})  # type: ignore[arg-type]
        self._links[frozenset(link.between)] = link
        return link

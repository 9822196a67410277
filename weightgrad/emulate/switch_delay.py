"""Delay by our own switch (switch.py), for kernels without `netem`."""

from __future__ import annotations

import subprocess
from typing import Any

from weightgrad.emulate.delays import Delay, DelayStats
from weightgrad.emulate.lab import HERE, PYTHON, Conversation, Lab
from weightgrad.emulate.plan import mac
from weightgrad.emulate.stats import Lateness
from weightgrad.emulate.topology import Topology, WanLink
from weightgrad.errors import EmulatorError, NamespacesRefusedError


class SwitchDelay(Delay):
    """One process in the `wan` namespace that holds the packets back."""

    name = "switch"

    def __init__(self, lab: Lab, topology: Topology, realtime: bool | None) -> None:
        self._lab, self._topology, self._wish = lab, topology, realtime
        self._switch: Conversation | None = None
        self.realtime = False

    def open(self) -> None:
        """Start it; real-time priority if it may have it."""
        process = self._lab.popen(
            "", "", [*PYTHON, str(HERE / "switch.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self._switch = Conversation(process, "the delay switch")
        places = range(len(self._topology.hosts))
        ports = [[f"w{i}", mac(0, i)] for i in places]
        lanes = [lane for link in self._topology.links for lane in self._lanes(link, cut=False)]
        wish = self._wish if self._wish is not None else not self._lab.rootless
        try:
            ready = self._switch.ask({"ports": ports, "lanes": lanes, "realtime": wish})
        except EmulatorError as error:
            raise NamespacesRefusedError(
                f"namespaces are allowed, but packet sockets in them are not: {error}"
            ) from error
        self.realtime = ready["realtime"]
        if self._wish and not self.realtime:
            raise EmulatorError("realtime=True: this system gives the delay switch no real-time priority; leave it out")

    def _lanes(self, link: WanLink, *, cut: bool) -> list[list[object]]:
        settings = {"delay": link.delay_seconds, "jitter": link.jitter_seconds, "loss": link.loss, "cut": cut}
        a, b = (self._topology.place(end) for end in link.between)
        return [[a, b, settings], [b, a, settings]]

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._switch is not None
        return self._switch.ask(request)

    def set(self, link: WanLink, *, cut: bool) -> None:
        """Both lanes, at once."""
        self._ask({"set": self._lanes(link, cut=cut)})

    def stats(self) -> DelayStats:
        """What the switch has counted."""
        found = self._ask({"stats": True})
        lost = {}
        for lane, counts in found["lanes"].items():
            a, b = lane.split(">")
            lost[int(a), int(b)] = counts["lost"]
        return DelayStats(lost, Lateness(**found["lateness"]), found["errors"])

    def fresh(self) -> None:
        """Lateness counts from here."""
        self._ask({"fresh": True})

    def describe(self) -> dict[str, object]:
        """Its priority."""
        return {"delay": self.name, "realtime": self.realtime}

    def close(self) -> None:
        """End the process."""
        if self._switch is not None:
            self._switch.close()
            self._switch = None

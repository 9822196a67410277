"""The event log of a simulation: what its lines say. Times are virtual."""

from __future__ import annotations

from collections.abc import Iterable

from weightgrad.core.global_model import GlobalModel
from weightgrad.core.server.open_round import ClosedRound
from weightgrad.event_log import EventLog
from weightgrad.lab.sim.evaluation import Evaluation
from weightgrad.lab.sim.links import Links
from weightgrad.lab.sim.network import Clock
from weightgrad.lab.sim.site import SimSite


class SimulationLog:
    """Writes what happens in a simulation.

    Args:
        events: the event log.
        clock: tells when it happens.
    """

    def __init__(self, events: EventLog, clock: Clock) -> None:
        self._events = events
        self._clock = clock

    def step(self, site: SimSite, loss: float) -> None:
        """A site has done a step."""
        self._events.write("step", self._clock.now, site=site.place.name, step=site.state.step, loss=loss)

    def stall(self, site: SimSite, seconds: float) -> None:
        """A site has waited because the server was silent."""
        fields = {"site": site.place.name, "step": site.state.step, "seconds": seconds}
        self._events.write("wait", self._clock.now, why="stall", **fields)

    def threshold(self, site: SimSite) -> None:
        """The significance threshold G of a site, where the trigger has one."""
        if site.state.threshold is not None:
            value = site.state.threshold.value
            self._events.write("threshold", self._clock.now, site=site.place.name, step=site.state.step, value=value)

    def lost(self, name: str) -> None:
        """The server has lost a site."""
        self._events.write("fault", self._clock.now, what="lost", where=[name])

    def round(self, closed: ClosedRound) -> None:
        """A round has closed, perhaps with a new sync schedule."""
        self._events.write("round", self._clock.now, **closed.to_dict())
        if closed.decision is not None:
            version = closed.result.version
            self._events.write("schedule", self._clock.now, version=version, **closed.decision.to_dict())

    def evaluation(self, found: Evaluation, model: GlobalModel, *, wan_bytes: int, lan_bytes: int) -> None:
        """The global model has been evaluated."""
        self._events.write(
            "evaluate",
            self._clock.now,
            step=model.step,
            version=model.version,
            accuracy=found.accuracy,
            loss=found.loss,
            global_model_accuracy=found.global_model,
            quantized_accuracy=found.quantized,
            ema_accuracy=found.ema,
            top5_accuracy=found.top5,
            wan_bytes=wan_bytes,
            lan_bytes=lan_bytes,
        )

    def end(self, status: str, links: Links, sites: Iterable[SimSite]) -> None:
        """The run is over: the bytes of each link, the times of each site, and the status."""
        now = self._clock.now
        for link, both in zip(links.links, links.bytes, strict=True):
            self._events.write("link", now, between=list(link.between), bytes=list(both))
        for site in sites:
            times = site.times
            self._events.write(
                "site",
                now,
                site=site.place.name,
                steps=site.state.step,
                compute_seconds=times.compute,
                codec_seconds=times.codec,
                lan_seconds=times.lan,
                waiting_seconds=times.waiting,
                lan_bytes=times.lan_bytes,
            )
        self._events.write("end", now, status=status)

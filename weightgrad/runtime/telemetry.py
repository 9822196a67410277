"""What the global server and the sites report: log lines, metrics and event logs, in the same words.

what happens                           logged by the server        logged by the site
a site joins, or joins again           "SITE joins ..."            "SITE: connected to the global server"
a site leaves in order                 "SITE leaves",              -
                                       "SITE: disconnected"
the connection is lost                 "SITE: connection lost"     "SITE: connection to the global server lost"
the server ends a session              "SITE: session ended by the global server: WHY"     the same
a round waits for a site               "round N has waited ..."    "SITE waits for OTHER ...", and at OTHER
                                                                   "the other sites wait for OTHER ..."
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from weightgrad.core.server.open_round import ClosedRound
from weightgrad.core.site.coordinator import SiteCoordinator
from weightgrad.event_log import EventLog, read
from weightgrad.kernels.moments import moments
from weightgrad.runtime.metrics import ServerMetrics, SiteMetrics
from weightgrad.runtime.one_line import OneLine, shortened
from weightgrad.runtime.rate_limiter import RateLimiter
from weightgrad.runtime.transport.transport import LinkEvent
from weightgrad.units import show_bytes
from weightgrad.wire.messages import Join, Push, Waiting

server_log = logging.getLogger("weightgrad.serve")
server_log.addFilter(OneLine())
site_log = logging.getLogger("weightgrad")

_NORMS_ROUNDS = 64  # a push that is so late has been dropped
_MEASURE_S = 2.0  # between two looks at the residual: each reads all of it
_LONG_WAIT_S = 5.0  # of a site for the others, from which on it is told
SERVER = "the global server"


class Telemetry:
    """What a global server reports."""

    def __init__(self, events: EventLog | None, metrics: ServerMetrics) -> None:
        self._events, self.metrics = events, metrics
        self._began = time.monotonic()
        self._away: set[str] = set()  # sites whose connection was lost, or closed
        self._norms: dict[tuple[str, int], float] = {}  # of pushes whose rounds have not closed
        self._sizes: dict[tuple[str, int], int] = {}  # of the same
        self._opened: dict[int, float] = {}  # when the first push of an open round came
        self._full = False  # the event log could not be written
        self._lines = RateLimiter(per_s=1.0, burst=20)  # of what strangers and single sites can cause

    @property
    def away(self) -> frozenset[str]:
        """The sites whose connection was lost, or closed."""
        return frozenset(self._away)

    @property
    def now(self) -> float:
        """Seconds since the server was first started, without those in which it was not running."""
        return time.monotonic() - self._began

    def continue_from(self, now: float) -> None:
        """After a restart: let the clock go on from this time, unless it is further."""
        self._began = min(self._began, time.monotonic() - now)

    def write(self, kind: str, **fields: Any) -> None:
        """Write a line into the event log, if there is one."""
        if self._events is None:
            return
        try:
            self._events.write(kind, self.now, **fields)
            self._full = False
        except OSError as error:
            if not self._full:  # the training does not end for want of a report
                server_log.error("cannot write %s: %s; events are left out until it can", self._events.path, error)
            self._full = True

    def received(self, site: str, size: int) -> None:
        """Count a message from a site."""
        self.metrics.up_bytes_total.labels(site=site).inc(size)

    def sent(self, site: str, size: int) -> None:
        """Count a message to a site."""
        self.metrics.down_bytes_total.labels(site=site).inc(size)

    def pushed(self, push: Push, version: int, squares: float = math.nan, size: int = 0) -> None:
        """Note a push that came.

        Args:
            push: its control message.
            version: of the global model when it came.
            squares: the sum of the squares of its values.
            size: its bytes, from all ranks of the site.
        """
        self._norms[push.site, push.round] = math.sqrt(squares) if squares >= 0 else math.nan
        self._sizes[push.site, push.round] = size
        self.metrics.updates_total.labels(site=push.site).inc()
        self.metrics.site_step.labels(site=push.site).set(push.step)
        self.metrics.site_staleness_versions.labels(site=push.site).set(version - push.seen)
        self.metrics.site_up.labels(site=push.site).set(1)
        if push.site in self._away:
            self._away.discard(push.site)
            self.write("connection", site=push.site, up=True, left=False)
        self._opened.setdefault(push.round, self.now)

    def joined(self, join: Join) -> None:
        """Note that a site has joined, for the first time or again."""
        codec = f", and downloads the global model in {join.download_codec}" if join.download_codec is not None else ""
        server_log.info("%s joins with global model version %d%s", join.site, join.version, codec)
        self.metrics.site_up.labels(site=join.site).set(1)
        self.write("site_joined", site=join.site, version=join.version)

    def leaves(self, site: str) -> None:
        """Note that a site has finished."""
        server_log.info("%s leaves", site)

    def disconnected(self, site: str, *, left: bool) -> None:
        """Note that a site is not connected; `left` if it closed the connection in order."""
        if left:
            server_log.info("%s: disconnected", site)
        else:
            server_log.warning("%s: connection lost", site)
        self.metrics.site_up.labels(site=site).set(0)
        self._away.add(site)
        self.write("connection", site=site, up=False, left=left)

    def gone(self, site: str, *, waited_for: bool) -> None:
        """Note that the process of a site has ended without leaving, and whether rounds wait until `t_global`."""
        what = "the other sites wait for it until t_global" if waited_for else "rounds continue without it"
        server_log.warning("%s is gone: its process has ended without leave(); %s", site, what)

    def held_back(self, site: str) -> None:
        """Note that the other sites wait for a late one."""
        server_log.warning("%s is late: the other sites wait for it", site)

    def round_is_late(self, waiting: Waiting) -> None:
        """Note that a round takes much longer than the rounds before, or misses a site that is not connected."""
        what = f"round {waiting.round}" if waiting.round else "the first global model"
        away = [f"{name} (not connected)" if name in self._away else name for name in waiting.missing]
        server_log.warning("%s has waited %d s for %s", what, waiting.seconds, ", ".join(away))

    def is_away(self, site: str) -> bool:
        """Whether the connection of a site was lost, or closed."""
        return site in self._away

    def lost(self, site: str) -> None:
        """Note that rounds continue without a site."""
        server_log.warning("%s has sent nothing for too long: rounds continue without it", site)
        self.write("fault", what="lost", where=[site])

    def set_aside(self, site: str, rounds: int) -> None:
        """Note that a site is set aside until it has pushed for so many rounds."""
        server_log.error(
            "%s is set aside: three times it was lost, or its update refused. What it sends still counts, but rounds "
            "do not wait for it before it has pushed for %d of them; ask its owner, or revoke its certificate",
            site,
            rounds,
        )
        self.metrics.sites_set_aside_total.labels(site=site).inc()
        self.write("fault", what="set aside", where=[site])

    def closed(self, closed: ClosedRound) -> None:
        """Note that a round has closed."""
        result, now = closed.result, self.now
        seconds = now - self._opened.pop(result.round, now)
        self.metrics.rounds_total.inc()
        self.metrics.round_seconds.observe(seconds)
        self.metrics.global_model_version.set(result.version)
        self.metrics.global_model_step.set(result.step)
        server_log.info(
            "round %d: step %d, %s; %s up, %s down each, %.2f s; global model %s",
            result.round,
            result.step,
            ", ".join(closed.senders),
            show_bytes(closed.up_bytes),
            show_bytes(closed.down_bytes),
            seconds,
            closed.digest,
        )
        norms = {site: self._norms.pop((site, number), math.nan) for site, number in closed.pushes}
        self._norms = {key: norm for key, norm in self._norms.items() if key[1] > result.round - _NORMS_ROUNDS}
        known = {site: float(f"{norm:.6g}") for site, norm in norms.items() if math.isfinite(norm)}
        sizes = Counter[str]()
        for site, number in closed.pushes:
            sizes[site] += self._sizes.pop((site, number), 0)
        self._sizes = {key: size for key, size in self._sizes.items() if key[1] > result.round - _NORMS_ROUNDS}
        self.write("round", **closed.to_dict(), norms=known, sizes=sizes)
        if closed.decision is not None:
            schedule = closed.decision.schedule
            server_log.info(
                "from version %d on: a round every %d steps, its result %d steps later, %s up and %s down: %s",
                result.version,
                schedule.every,
                schedule.overlap,
                schedule.up,
                closed.decision.to_dict()["down"],
                closed.decision.why,
            )
            self.write("schedule", version=result.version, **closed.decision.to_dict())

    def write_missing_rounds(self, rounds: list[dict[str, Any]]) -> None:
        """Write the rounds of a checkpoint that a server, killed right after it, could not write into the event log."""
        if self._events is None or not rounds:
            return
        written = {entry["version"] for entry in read(self._events.path) if entry["kind"] == "round"}
        for line in rounds:
            if line["version"] not in written:
                self.write("round", **line)

    def operated(self, who: str, what: str, site: str) -> None:
        """Note what an operator has had done."""
        server_log.warning("%s: %s%s", who, what, f" {site}" if site else "")
        self.write("operator", who=who, what=what, where=[site] if site else [])

    def refused_update(self, site: str, why: str) -> None:
        """Note that a message of a site was refused."""
        self.metrics.refused_updates_total.labels(site=site).inc()
        if self._lines.try_take(("update", site)):
            server_log.error("an update of %s was refused: %s", site, why)
            self.write("refused", site=site, why=shortened(why))

    def limited_update(self, site: str, why: str) -> None:
        """Note that an update of a site counts only in part."""
        self.metrics.limited_updates_total.labels(site=site).inc()
        if self._lines.try_take(("limited", site)):
            server_log.warning("an update of %s was limited: %s; `serve --most-share` sets the limit", site, why)
            self.write("limited", site=site, why=why)

    def refused_connection(self, reason: str) -> None:
        """Note that a connection was refused, for one of a few fixed reasons."""
        self.metrics.refused_connections_total.labels(reason=reason).inc()
        if self._lines.try_take(("connection", reason)):
            server_log.warning("a connection was refused: %s", reason)


class SiteTelemetry:
    """What the local server of a site reports about its connection to the global server.

    Attributes:
        connected: whether messages flow.
        refused: why the global server has ended the session; None if it has not.
        without: the sites that were in earlier results and are not in the last one.
        waiting: for whom a round waits, as the server says; None once something else has come.
        waits: by name, how often this site has waited for others so long that it said so.
    """

    def __init__(self, site: str, events: EventLog | None) -> None:
        self.metrics, self._events = SiteMetrics(site), events
        self._site, self._began = site, time.monotonic()
        self._measured_at = -math.inf
        self.without: Sequence[str] = ()
        self.waiting: Waiting | None = None
        self.waits: Counter[str] = Counter()
        self._said_waiting: tuple[int, Sequence[str]] | None = None
        self.connected = False
        self.refused: str | None = None

    @property
    def now(self) -> float:
        """Seconds since this site came."""
        return time.monotonic() - self._began

    def sent(self, size: int, push: Push | None) -> None:
        """Count a message; a push also gets a line in the event log, whose bytes are in that of the server."""
        self.metrics.traffic(sent=size)
        if push is not None and self._events is not None:
            self._events.write("push", self.now, round=push.round, step=push.step)

    def received(self, size: int) -> None:
        """Count a message."""
        self.metrics.traffic(received=size)

    def encoded(self, round_: int, seconds: float, residual: Tensor | None, trip_s: float) -> None:
        """Note that a push was made and queued.

        Args:
            round_: of the push.
            seconds: that selecting and encoding took, on this rank.
            residual: what this rank has left behind, whose norm is taken now and then; None: nothing.
            trip_s: the shortest round trip to the server seen lately; 0: not known.
        """
        self.metrics.encoded(seconds)
        if self._events is None or self.now - self._measured_at < _MEASURE_S:
            return
        self._measured_at = self.now
        on_host = residual is not None and residual.device.type == "cpu"  # a device would have to be waited for
        norm = math.sqrt(moments(residual).squares) if residual is not None and on_host else 0.0
        self.metrics.measured(norm, trip_s)
        facts = {
            "round": round_,
            "seconds": round(seconds, 6),
            "residual": norm,
            "trip_seconds": round(trip_s, 6) or None,
        }
        self._events.write("encoded", self.now, **facts)

    def waited_for_server(self, step: int, seconds: float, why: str) -> None:
        """Count a wait of the training loop, and say so if it was a long one."""
        self.metrics.waited(seconds)
        if why == "paused":
            site_log.info("%s: the run goes on after a pause of %.0f s", self._site, seconds)
        elif seconds >= _LONG_WAIT_S and why != "joining":
            without = f"; the round has closed without {', '.join(self.without)}" if self.without else ""
            whom = ", ".join(self._said_waiting[1]) if self._said_waiting is not None else "the other sites"
            site_log.warning("%s waited %.0f s for %s (%s)%s", self._site, seconds, whom, why, without)
        self._said_waiting = None
        if self._events is not None:
            self._events.write("wait", self.now, step=step, seconds=round(seconds, 6), why=why)

    def others_wait(self, waiting: Waiting) -> None:
        """The server says for whom a round waits."""
        self.waiting = waiting
        if self._site in waiting.missing:
            what = f"for its push of round {waiting.round}" if waiting.round else "for the first global model"
            site_log.warning("the other sites wait for %s, %s, since %d s", self._site, what, waiting.seconds)

    def waits_for(self) -> list[str]:
        """For whom this site waits, if it does: the sites that a round misses, or the global server."""
        if not self.connected:
            return [SERVER]
        return [name for name in self.waiting.missing if name != self._site] if self.waiting is not None else []

    def says_waiting(self, seconds: float) -> None:
        """Training has waited so long: say for whom, once for each."""
        whom = self.waits_for()
        if seconds < _LONG_WAIT_S or not whom:
            return
        round_ = self.waiting.round if self.waiting is not None and self.connected else 0
        if self._said_waiting != (round_, whom):
            self._said_waiting = (round_, whom)
            self.waits.update(whom)
            what = f", round {round_}" if round_ else ""
            site_log.warning("%s waits for %s (%.0f s%s)", self._site, ", ".join(whom), seconds, what)

    def link_event(self, event: LinkEvent, why: str) -> None:
        """Report what has happened to the connection."""
        self.connected = event is LinkEvent.CONNECTED
        self.metrics.set_connected(self.connected)
        if event is LinkEvent.CONNECTED:
            site_log.info("%s: connected to the global server", self._site)
        elif event is LinkEvent.LOST:
            site_log.warning("%s: connection to the global server lost; reconnecting", self._site)
        elif event is LinkEvent.REFUSED:
            self.refused = why
            site_log.error("%s: session ended by the global server: %s", self._site, why)
        else:
            site_log.warning("%s: the global server does not know this session (%s); joining again", self._site, why)

    def downloaded(self, version: int, *, exact: bool) -> None:
        """Report that the whole global model has come."""
        kind = "exact" if exact else "approximate; the exact one follows"
        site_log.info("%s: received the whole global model, version %d, %s", self._site, version, kind)

    def status(self, state: SiteCoordinator | None) -> dict[str, object]:
        """What /healthz of a site shows; unhealthy once the global server has refused it."""
        return {
            "healthy": self.refused is None,
            "site": self._site,
            "connected": self.connected,
            "step": None if state is None else state.progress.step,
            "version": None if state is None else state.version,
            "waiting_for": self.waits_for(),
            "refused": self.refused,
        }

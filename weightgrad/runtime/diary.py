"""What the global server says about itself: log lines, metrics and the ledger, each event told once."""

from __future__ import annotations

import logging
import time
from typing import Any

from weightgrad.ledger import Ledger, read
from weightgrad.runtime.metrics import Metrics
from weightgrad.units import show_bytes
from weightgrad.wan.global_server import Closed
from weightgrad.wan.messages import Join, Push, nbytes

log = logging.getLogger("weightgrad.serve")


class Diary:
    """One a server."""

    def __init__(self, ledger: Ledger | None, metrics: Metrics) -> None:
        self._ledger, self.metrics = ledger, metrics
        self._began = time.monotonic()
        self._opened: dict[int, float] = {}

    @property
    def now(self) -> float:
        """Seconds since the server was started."""
        return time.monotonic() - self._began

    def write(self, kind: str, **fields: Any) -> None:
        """A line of the ledger, if there is one."""
        if self._ledger is not None:
            self._ledger.write(kind, self.now, **fields)

    def pushed(self, push: Push, version: int) -> None:
        """A push has come, with the base at that version."""
        self.metrics.updates_total.labels(site=push.site).inc()
        self.metrics.up_bytes_total.labels(site=push.site).inc(nbytes(push))
        self.metrics.site_step.labels(site=push.site).set(push.step)
        self.metrics.site_staleness_versions.labels(site=push.site).set(version - push.seen)
        self.metrics.site_up.labels(site=push.site).set(1)
        self._opened.setdefault(push.round, self.now)

    def joined(self, join: Join) -> None:
        """A site is here, first or again."""
        asks = f", and takes its first base in {join.first_base}" if join.first_base is not None else ""
        log.info("%s joins with base version %d%s", join.site, join.version, asks)
        self.metrics.site_up.labels(site=join.site).set(1)
        self.write("site_joined", site=join.site, version=join.version)

    def lost(self, site: str) -> None:
        """A site was given up."""
        log.warning("%s has said nothing for too long: rounds go on without it", site)
        self.write("fault", what="lost", where=[site])

    def closed(self, closed: Closed) -> None:
        """A round is over."""
        answer, now = closed.answer, self.now
        seconds = now - self._opened.pop(answer.round, now)
        self.metrics.rounds_total.inc()
        self.metrics.round_seconds.observe(seconds)
        self.metrics.base_version.set(answer.version)
        self.metrics.base_step.set(answer.step)
        log.info(
            "round %d: step %d, %s; %s up, %s down each, %.2f s; base %s",
            answer.round,
            answer.step,
            ", ".join(closed.senders),
            show_bytes(closed.up_bytes),
            show_bytes(closed.down_bytes),
            seconds,
            closed.base,
        )
        self.write("round", **closed.words())
        if closed.decision is not None:
            pace = closed.decision.pace
            log.info(
                "from version %d on: a round every %d steps, answered %d steps later, %s up and %s down: %s",
                answer.version,
                pace.every,
                pace.overlap,
                pace.up,
                closed.decision.words()["down"],
                closed.decision.why,
            )
            self.write("pace", version=answer.version, **closed.decision.words())

    def unsaid(self, lines: list[dict[str, Any]]) -> None:
        """Rounds of the checkpoint that a server, killed right after it, had no time to write into the ledger."""
        if self._ledger is None or not lines:
            return
        written = {entry["version"] for entry in read(self._ledger.path) if entry["kind"] == "round"}
        for line in lines:
            if line["version"] not in written:
                self.write("round", **line)

    def refused_update(self, site: str, why: str) -> None:
        """A push, or what claimed to be one."""
        log.error("an update of %s was refused: %s", site, why)
        self.metrics.refused_updates_total.labels(site=site).inc()
        self.write("refused", site=site, why=why)

    def refused_connection(self, reason: str) -> None:
        """Somebody who may not come in."""
        log.warning("a connection was refused: %s", reason)
        self.metrics.refused_connections_total.labels(reason=reason).inc()

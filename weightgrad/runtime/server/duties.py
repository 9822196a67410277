"""What the global server does unasked: deadlines of rounds, reports of waits, snapshots, another first site."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from weightgrad.runtime.server.admission import Admission
from weightgrad.runtime.server.inputs import ServerInputs
from weightgrad.runtime.server.snapshots import ServerSnapshots
from weightgrad.runtime.server.wait_report import WaitReport
from weightgrad.runtime.telemetry import Telemetry
from weightgrad.runtime.transport.transport import ServerTransport

log = logging.getLogger("weightgrad.serve")

_LOOK_S = 0.5  # between two looks at what has to be said or written, while messages keep coming
_STARVED_S = 2.0  # for which messages go before a deadline that has expired


class ServerDuties:
    """The duties of one global server.

    Args:
        inputs: the rounds, whose deadlines expire.
        snapshots: written when the log has grown long.
        waits: says for whom a round waits.
        admission: who is to send the first global model.
        telemetry: has the time, and who is away.
        transport: the connections to the sites.
        sites: who is told of waits.
        first_model_s: seconds without a part of it after which another site may send the first global model.
    """

    def __init__(
        self,
        inputs: ServerInputs,
        snapshots: ServerSnapshots,
        waits: WaitReport,
        admission: Admission,
        telemetry: Telemetry,
        transport: ServerTransport,
        sites: Sequence[str],
        first_model_s: float,
    ) -> None:
        self._inputs, self._snapshots, self._waits, self._admission = inputs, snapshots, waits, admission
        self._telemetry, self._transport, self._sites = telemetry, transport, sites
        self._first_model_s = first_model_s
        self._looked = self._due_since = 0.0

    def look(self, *, idle: bool) -> None:
        """Deadlines, snapshots and reports: when no message waits, and also while a site keeps messages coming.

        Messages go first, since one that waits may be what a deadline is about; but only for so long.

        Args:
            idle: whether no message waits.
        """
        if time.monotonic() - self._looked > _LOOK_S or idle:
            self._looked = time.monotonic()
            self._report_waits()
            self._give_up_first_model()
            self._snapshots.write_if_due()
        rounds, now = self._inputs.rounds, self._telemetry.now
        wake = None if rounds is None else rounds.coordinator.next_wake()
        if rounds is None or rounds.closing or wake is None or now < wake:
            self._due_since = time.monotonic()
        elif idle or time.monotonic() - self._due_since > _STARVED_S:
            self._due_since = time.monotonic()
            rounds.wake(now)

    def _report_waits(self) -> None:
        """Say for whom the oldest open round, or the first global model, waits."""
        core, now = self._inputs.coordinator, self._telemetry.now
        if core is not None:
            waiting, late = core.waiting(now), core.overdue(now)
        else:
            waiting, late = self._inputs.first_model.waiting(), True
        late = late or (waiting is not None and any(self._telemetry.is_away(site) for site in waiting.missing))
        self._waits.look(waiting, now, self._sites, late=late)

    def _give_up_first_model(self) -> None:
        """Let another site send the first global model if the one that was to does not."""
        if self._inputs.rounds is not None or self._admission.initializer is None:
            return
        if self._inputs.first_model.silent_s < self._first_model_s:
            return
        if (late := self._admission.give_up_first()) is not None:
            why = f"{late} has sent nothing of the first global model for {self._first_model_s:g} s"
            log.warning("%s: the next site may send it", why)
            for peer in [peer for peer in self._transport.sessions() if peer.site == late]:
                self._transport.drop(peer, why)

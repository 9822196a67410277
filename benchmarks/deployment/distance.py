"""Distance on one machine.

Where the round trip to the server is a millisecond or two, `auto` exchanges everything after every step
(`core/controller/near_line.py`). A benchmark on one machine that asks what `auto` costs over a WAN tells its sites that
the server is far away. Nothing is delayed; only the round trip that sites report is another.
"""

from __future__ import annotations

from weightgrad.runtime.site.rank_connection import RankConnection

TRIP_S = 0.08


def pretend_distance(trip_s: float = TRIP_S) -> None:
    """Let this process measure this round trip to the server, whatever it is."""

    def measured(connection: RankConnection) -> float:
        return trip_s

    def forget(connection: RankConnection, value: float) -> None:
        """What TCP has measured."""

    RankConnection.trip_s = property(measured, forget)  # type: ignore[assignment]

"""What is known of each site of a run, for the operator: one row a site."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from weightgrad.core.server.coordinator import ServerCoordinator
from weightgrad.core.server.membership import BY_OPERATOR, Member
from weightgrad.runtime.server.roster import Roster
from weightgrad.runtime.transport.transport import ServerTransport


def site_rows(
    roster: Roster, core: ServerCoordinator | None, transport: ServerTransport, away: Collection[str]
) -> list[dict[str, Any]]:
    """One row for each site, those that were removed last.

    Args:
        roster: who may take part.
        core: decides; None before there is a global model.
        transport: who is connected.
        away: the sites whose connections were lost or closed.
    """
    connected: dict[str, int] = {}
    for peer, status in transport.sessions().items():
        connected[peer.site] = connected.get(peer.site, 0) + bool(status.streams)
    waits_for = [] if core is None else core.waits_for()
    rows = []
    for name in sorted(roster.names, key=lambda name: (name in roster.facts.removed, roster.number(name))):
        member = None if core is None else core.members.by_name.get(name)
        serials = roster.facts.serials.get(name, ())
        rows.append(
            {
                "site": name,
                "number": roster.number(name),
                "added": roster.is_added(name),
                "state": _standing(member, here=bool(connected.get(name)))
                if not roster.is_out(name)
                else "removed"
                if name not in roster.sites
                else "revoked",
                "ranks": connected.get(name, 0),
                "connected": bool(connected.get(name)) and name not in away,
                "round": 0 if member is None else member.pushed_round,
                "waited_for": name in waits_for,
                "certificate": f"{serials[-1]:x}" if serials else None,
            }
        )
    return rows


def _standing(member: Member | None, *, here: bool) -> str:
    """How a site stands, in a word or two."""
    if member is None:
        return "not joined"
    if not member.live:
        return "finished" if member.done else "lost"
    if member.done:
        return "finished"
    if member.aside:
        return "set aside" if member.aside >= BY_OPERATOR // 2 else f"set aside for {member.aside} pushes"
    if not here:
        return "not connected"
    if member.loading:
        return "loading"
    return "training" if member.pushed_round else "no push yet"

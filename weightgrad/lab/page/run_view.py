"""What the page shows of a run: totals, a row for each site, curves, and the timeline of the last minute."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from weightgrad.lab.page.run_state import RunState
from weightgrad.lab.page.site_record import SiteRecord

_POINTS = 400  # of a curve
_WINDOW_SECONDS = 60.0  # of the timeline
_RATE_SECONDS = 10.0  # over which throughput is measured
_DOLLARS_GB = 0.09


def run_view(state: RunState, dollars_gb: float = _DOLLARS_GB) -> dict[str, Any]:
    """The page's data, as JSON has it.

    Args:
        state: what is known of the run.
        dollars_gb: what a gigabyte over a link costs.
    """
    up = sum(site.up_bytes for site in state.sites.values())
    down = sum(site.down_bytes for site in state.sites.values())
    dollars = (up + down) / 1e9 * dollars_gb
    hours = state.now / 3600
    return {
        "name": state.name,
        "status": state.status,
        "strategy": state.strategy,
        "parameters": state.parameters,
        "steps": (state.recipe.get("training") or {}).get("steps"),
        "server": (state.recipe.get("server") or {}).get("name", "global server"),
        "t": state.now,
        "rounds": state.round_count,
        "version": state.version,
        "up_bytes": up,
        "down_bytes": down,
        "dollars": dollars,
        "dollars_hour": dollars / hours if hours > 0 else 0.0,
        "loss": {name: thin(points) for name, points in state.losses.items()},
        "accuracy": state.accuracy[-_POINTS:],
        "sites": [_site_view(state, site) for site in state.sites.values()],
        "last_round": state.rounds[-1] if state.rounds else None,
        "agreement": _agreement(state),
        "decisions": list(state.decisions)[-20:][::-1],
        "faults": list(state.faults)[-50:][::-1],
        "timeline": _timeline(state),
        "processes": list(state.processes.values()),
    }


def _site_view(state: RunState, site: SiteRecord) -> dict[str, Any]:
    recent = [moved for moved in site.moved if site.at(moved[0]) > state.now - _RATE_SECONDS]
    seconds = min(_RATE_SECONDS, max(state.now, 1e-9))
    links = state.recipe.get("links") or ()
    link: dict[str, Any] = next((one for one in links if site.name in (one.get("between") or ())), {})
    waits = [wait for wait in site.waits if site.at(wait[0]) > state.now - _WINDOW_SECONDS]
    window = min(_WINDOW_SECONDS, max(state.now, 1e-9))
    told = bool(site.waits) or not site.waiting_seconds  # the simulator tells the sum of a run, and not when
    return {
        "name": site.name,
        "step": site.step,
        "loss": site.loss,
        "connected": site.connected,
        "finished": site.finished,
        "cut": site.cut,
        "waiting_seconds": site.waiting_seconds,
        "waiting_share": min(1.0, sum(wait[1] for wait in waits) / window) if told else None,
        "up_bytes": site.up_bytes,
        "down_bytes": site.down_bytes,
        "up_bit_s": 8 * sum(moved[1] for moved in recent) / seconds,
        "down_bit_s": 8 * sum(moved[2] for moved in recent) / seconds,
        "exchange_seconds": _exchange_seconds(state, site),
        "last_of": site.last_of,
        "margin_seconds": site.margin_seconds,
        "removed": site.removed,
        "aside": site.aside,
        "encode_seconds": site.encode_seconds,
        "residual": site.residual,
        "push_norm": site.norm,
        "left_behind": _left_behind(site.residual, site.norm),
        "trip_seconds": site.trip_seconds,
        "rounds": site.rounds,
        "bandwidth_bit_s": link.get("bandwidth"),
        "delay_seconds": link.get("delay"),
        "loss_rate": link.get("loss"),
        "cuts": sum(1 for f in state.faults if f["kind"] == "fault" and site.name in f["where"]),
    }


def _exchange_seconds(state: RunState, site: SiteRecord) -> float | None:
    """Seconds from the last push to the end of its round."""
    if not state.rounds or site.offset is None or not site.pushes:
        return None
    number, (left, _) = next(reversed(site.pushes.items()))
    del number
    after = [one["t"] for one in state.rounds if one["t"] >= site.at(left) and site.name in one["senders"]]
    return after[0] - site.at(left) if after else None


def _agreement(state: RunState) -> float | None:
    """The share of equal signs among what two sites sent, where `auto` compares them."""
    compared = [one for one in list(state.rounds)[-9:] if one["common"]]
    common = sum(one["common"] for one in compared)
    return sum(one["same"] for one in compared) / common if common else None


def _timeline(state: RunState) -> dict[str, Any]:
    """Steps, waits, encoding and pushes of the last minute, on the server's clock."""
    start = state.now - _WINDOW_SECONDS
    found = []
    for site in state.sites.values():
        if site.offset is None:
            continue
        ends = [(site.at(t), step) for t, step, _ in site.steps if site.at(t) > start]
        waits = [(site.at(t) - s, site.at(t), why) for t, s, why in site.waits if site.at(t) > start]
        steps = []
        for (before, _), (end, step) in pairwise(ends):
            waited = max((w[1] for w in waits if before <= w[1] <= end), default=before)
            steps.append([max(before, waited), end, step])
        pushed = [(site.at(t), n, b) for n, (t, b) in list(site.pushes.items())[-600:] if site.at(t) > start]
        closed = [one["t"] for one in state.rounds if site.name in one["senders"]]
        pushes = [[t, next((c for c in closed if c >= t), state.now), n, b] for t, n, b in pushed]
        encodes = [(site.at(t) - s, site.at(t)) for t, s in site.encodes if site.at(t) > start]
        own = {"steps": steps[-300:], "waits": waits[-300:], "encodes": encodes[-200:], "pushes": pushes[-200:]}
        found.append({"site": site.name, **own})
    return {"start": max(0.0, start), "end": state.now, "sites": found}


def _left_behind(residual: float | None, push: float | None) -> float | None:
    """The share of an update that a push leaves in the residual, as lengths of vectors at right angles."""
    if residual is None or push is None or not residual + push:
        return None
    return residual / math.hypot(residual, push)


def thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most so many points of a curve, the last one among them."""
    if len(points) <= _POINTS:
        return points
    stride = math.ceil(len(points) / _POINTS)
    kept = points[::stride]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]

"""What the page shows of a run: totals, a row for each site, curves, and the timeline of the last minute."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from weightgrad.lab.page.run_state import RunState
from weightgrad.lab.page.site_record import SiteRecord

_POINTS = 400  # of a curve
_WINDOW_SECONDS = 60.0  # of the timeline
_RATE_SECONDS = 10.0  # over which throughput is measured
_BARS = 400  # of a site in the timeline, of each kind
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
        "recipe": str(state.recipe.get("name", "")),
        "status": state.status,
        "strategy": state.strategy,
        "parameters": state.parameters,
        "steps": (state.recipe.get("training") or {}).get("steps"),
        "server": (state.recipe.get("server") or {}).get("name", ""),
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
        "faults": sorted(state.faults, key=lambda fault: -fault["t"])[:50],
        "unread": state.unread,
        "timeline": _timeline(state),
        "processes": list(state.processes.values()),
    }


def _site_view(state: RunState, site: SiteRecord) -> dict[str, Any]:
    recent = [moved for moved in site.moved if moved[0] > state.now - _RATE_SECONDS]
    seconds = min(_RATE_SECONDS, max(state.now, 1e-9))
    link = _link_of(state.recipe, site.name)
    waits = [wait for wait in site.waits if site.at(wait[0]) > state.now - _WINDOW_SECONDS]
    window = min(_WINDOW_SECONDS, max(state.now, 1e-9))
    known = site.told or bool(site.waits)
    told = bool(site.waits) or (known and not site.waiting_seconds)  # the simulator tells the sum at its end, not when
    return {
        "name": site.name,
        "step": site.step,
        "loss": site.loss,
        "connected": site.connected,
        "finished": site.finished,
        "cut": site.cut,
        "waiting_seconds": site.waiting_seconds if known else None,
        "waiting_share": min(1.0, sum(wait[1] for wait in waits) / window) if told else None,
        "up_bytes": site.up_bytes,
        "down_bytes": site.down_bytes,
        "up_bit_s": 8 * sum(moved[1] for moved in recent) / seconds,
        "down_bit_s": 8 * sum(moved[2] for moved in recent) / seconds,
        "exchange_seconds": _exchange_seconds(state, site),
        "last_of": site.last_of if site.pushes else None,  # without its own log nobody knows when it pushed
        "margin_seconds": site.margin_seconds if site.pushes else None,
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
        "cuts": site.cuts,
    }


def _link_of(recipe: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The link of a site: one that names it, or that of its template."""
    links: list[Mapping[str, Any]] = [link for link in recipe.get("links") or () if isinstance(link, Mapping)]
    ends = [[str(end) for end in link.get("between") or ()] for link in links]
    exact = (link for link, both in zip(links, ends, strict=True) if name in both)
    template = (
        link
        for link, both in zip(links, ends, strict=True)
        if any(re.fullmatch(r"\d+".join(map(re.escape, end.split("{}"))), name) for end in both if "{}" in end)
    )
    return next(exact, None) or next(template, {})


def _exchange_seconds(state: RunState, site: SiteRecord) -> float | None:
    """Seconds from the last push to the end of its round."""
    if not state.rounds or site.offset is None or not site.pushes:
        return None
    left = next(reversed(site.pushes.values()))
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
        pushed = [(site.at(t), n, site.sizes.get(n)) for n, t in site.pushes.items() if site.at(t) > start]
        closed = [one["t"] for one in state.rounds if site.name in one["senders"]]
        pushes = [[t, next((c for c in closed if c >= t), state.now), n, b] for t, n, b in pushed]
        encodes = [(site.at(t) - s, site.at(t)) for t, s in site.encodes if site.at(t) > start]
        waits = sorted(sorted(waits, key=lambda wait: wait[0] - wait[1])[:_BARS])
        own = {"steps": _joined(steps), "waits": waits, "encodes": encodes[-_BARS:], "pushes": pushes[-_BARS:]}
        found.append({"site": site.name, **own})
    return {"start": max(0.0, start), "end": state.now, "sites": found}


def _joined(steps: list[list[Any]]) -> list[list[Any]]:
    """Bars of steps; where there are more than a screen shows, neighbours in one. Waiting is drawn over them."""
    each = max(1, math.ceil(len(steps) / _BARS))
    groups = [steps[first : first + each] for first in range(0, len(steps), each)]
    return [[group[0][0], group[-1][1], group[-1][2]] for group in groups]


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

"""What a page shows of a run, worked out from the lines of its event logs and from nothing else.

The clocks of a deployment begin when each process does. A site's clock is put beside the server's by its pushes: none
arrives before it is sent, so the smallest time between a push and the end of its round is the difference of the clocks
and one way of the link.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from weightgrad.lab.page.run_reader import Event

_POINTS = 400  # of a curve
_WINDOW_SECONDS = 60.0  # of the timeline
_RATE_SECONDS = 10.0  # over which throughput is measured
_KEPT = 4000  # lines of each kind and site that a timeline may need
_TOLD = 200  # of faults and decisions
_DOLLARS_GB = 0.09
_OTHER_CLOCKS = ("process", "evaluate", "network", "site")  # not written by the server, or after the end


@dataclass
class SiteView:
    """What is known of a site."""

    name: str
    step: int = 0
    loss: float | None = None
    connected: bool | None = None
    finished: bool = False
    removed: bool = False  # or its certificate revoked
    aside: bool = False
    cut: bool = False
    waiting_seconds: float = 0.0
    up_bytes: float = 0.0
    down_bytes: float = 0.0
    rounds: int = 0
    last_of: int = 0  # rounds that waited for this site longest
    encode_seconds: float | None = None  # of the last push that was measured
    residual: float | None = None  # its norm, then
    norm: float | None = None  # of the last push
    trip_seconds: float | None = None
    margin_seconds: float = 0.0  # that the others have waited for this site, as far as pushes tell
    offset: float | None = None  # added to the site's clock, gives the server's
    steps: deque[tuple[float, int, float | None]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    waits: deque[tuple[float, float, str]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    pushes: dict[int, tuple[float, int]] = field(default_factory=dict)  # by round: when it left, and its bytes
    moved: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))  # t, up, down

    def at(self, t: float) -> float:
        """A time of the site's clock by the server's."""
        return t + (self.offset or 0.0)


class RunState:
    """Everything that the page shows. `add` takes a line; `view` is the page's data.

    Args:
        recipe: the recipe of the run, as JSON has it; empty if it is not known.
        name: what to call the run.
    """

    def __init__(self, recipe: Mapping[str, Any], name: str) -> None:
        self.recipe, self.name = recipe, name
        self.sites: dict[str, SiteView] = {}
        self.status = "waiting"
        self.strategy = str((recipe.get("strategy") or {}).get("name", "")) if recipe else ""
        self.parameters: int | None = None
        self.now = 0.0
        self.rounds: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self.round_count = 0
        self.version = 0
        self.losses: dict[str, list[tuple[int, float]]] = {}
        self.accuracy: list[tuple[int, float]] = []
        self.decisions: deque[dict[str, Any]] = deque(maxlen=_TOLD)
        self.faults: deque[dict[str, Any]] = deque(maxlen=_TOLD)
        self.processes: dict[str, dict[str, Any]] = {}
        for name_of_site in _site_names(recipe):
            self._site(name_of_site)

    def _site(self, name: str) -> SiteView:
        return self.sites.setdefault(name, SiteView(name))

    def add(self, source: str, event: Event) -> None:
        """Take one line of a log."""
        handler = getattr(self, f"_on_{event['kind']}", None)
        if handler is not None:
            handler(source, float(event["t"]), event)
        if source == "" and event["kind"] not in _OTHER_CLOCKS:
            self.now = max(self.now, float(event["t"]))
        elif source in self.sites and self.sites[source].offset is not None:
            self.now = max(self.now, self.sites[source].at(float(event["t"])))

    # -- what lines say ------------------------------------------------------------------------

    def _on_run(self, source: str, t: float, event: Event) -> None:
        del source, t
        self.status = "running"
        self.strategy = str(event.get("strategy", self.strategy))
        self.parameters = event.get("parameters", self.parameters)
        if not self.recipe and isinstance(event.get("recipe"), dict):
            self.recipe = event["recipe"]
        for name in event.get("sites", ()):
            self._site(name)

    def _on_site_joined(self, source: str, t: float, event: Event) -> None:
        del source
        site = self._site(event["site"])
        if site.connected is False:
            self._tell(t, f"{site.name} is back", "recovery", [site.name])
        site.connected = True
        self.status = "running"

    def _on_connection(self, source: str, t: float, event: Event) -> None:
        del source
        site = self._site(event["site"])
        if event.get("up"):
            if site.connected is False:
                self._tell(t, f"the connection of {site.name} is back", "recovery", [site.name])
            site.connected = True
            return
        site.connected = False
        if event.get("left"):
            site.finished = True
        else:
            self._tell(t, f"the connection of {site.name} is lost", "fault", [site.name])

    def _on_step(self, source: str, t: float, event: Event) -> None:
        site = self._site(source or event["site"])
        site.step = max(site.step, int(event["step"]))
        site.loss = event.get("loss")
        site.steps.append((t, int(event["step"]), event.get("loss")))
        if source == "":
            site.connected = True if site.connected is None else site.connected
            site.offset = 0.0
        if site.loss is not None:
            self.losses.setdefault(site.name, []).append((site.step, float(site.loss)))
            if len(self.losses[site.name]) > 4 * _POINTS:
                self.losses[site.name] = self.losses[site.name][::2]

    def _on_wait(self, source: str, t: float, event: Event) -> None:
        site = self._site(source or event["site"])
        site.waiting_seconds += float(event["seconds"])
        site.waits.append((t, float(event["seconds"]), str(event.get("why", ""))))

    def _on_push(self, source: str, t: float, event: Event) -> None:
        site = self._site(source)
        site.pushes[int(event["round"])] = (t, int(event["bytes"]))
        site.up_bytes += int(event["bytes"])
        site.moved.append((t, float(event["bytes"]), 0.0))
        while len(site.pushes) > _KEPT:
            del site.pushes[next(iter(site.pushes))]

    def _on_encoded(self, source: str, t: float, event: Event) -> None:
        del t
        site = self._site(source or event["site"])
        site.encode_seconds, site.residual = float(event["seconds"]), float(event["residual"])
        site.trip_seconds = event.get("trip_seconds")

    def _on_operator(self, source: str, t: float, event: Event) -> None:
        del source
        what, where = str(event.get("what", "")), [str(name) for name in event.get("where", ())]
        self._tell(t, f"{event.get('who', 'the operator')}: {' '.join([what, *where])}", "operator", where)
        if what in ("pause", "resume"):
            self.status = "paused" if what == "pause" else "running"
        for name in where:
            site = self._site(name)
            site.removed = what in ("remove", "revoke") or (site.removed and what != "add")
            site.aside = what == "set-aside" or (site.aside and what != "take-back")

    def _on_round(self, source: str, t: float, event: Event) -> None:
        del source
        self.status = "paused" if self.status == "paused" else "running"
        self.round_count += 1
        self.version = max(self.version, int(event["version"]))
        pushes = {str(name): int(number) for name, number in event.get("pushes", ())}
        arrivals = {}
        for name, number in pushes.items():
            site = self._site(name)
            site.rounds += 1
            site.connected, site.removed = True, False
            site.norm = (event.get("norms") or {}).get(name, site.norm)
            sent = site.pushes.get(number)
            if sent is not None:
                site.offset = t - sent[0] if site.offset is None else min(site.offset, t - sent[0])
                arrivals[name] = site.at(sent[0])
            elif not site.pushes:  # its own log is not here
                site.up_bytes += event["up_bytes"] / max(1, len(pushes))
                site.moved.append((t, event["up_bytes"] / max(1, len(pushes)), 0.0))
        for site in self.sites.values():
            site.down_bytes += event["down_bytes"]
            site.moved.append((t - (site.offset or 0.0), 0.0, float(event["down_bytes"])))
        late = max(arrivals, key=lambda name: arrivals[name]) if len(arrivals) > 1 else None
        if late is not None:
            self.sites[late].last_of += 1
            self.sites[late].margin_seconds += max(arrivals.values()) - sorted(arrivals.values())[-2]
        self.rounds.append(
            {
                "t": t,
                "version": event["version"],
                "step": event["step"],
                "senders": list(event.get("senders", ())),
                "up_bytes": event["up_bytes"],
                "down_bytes": event["down_bytes"],
                "late": late,
                "margin": max(arrivals.values()) - min(arrivals.values()) if len(arrivals) > 1 else None,
                "common": event.get("common"),
                "same": event.get("same"),
            }
        )

    def _on_evaluate(self, source: str, t: float, event: Event) -> None:
        del source, t
        if event.get("accuracy") is not None:
            self.accuracy.append((int(event["step"]), float(event["accuracy"])))

    def _on_schedule(self, source: str, t: float, event: Event) -> None:
        del source
        keys = ("every", "overlap", "up", "down", "why", "version")
        self.decisions.append({"t": t, **{key: event.get(key) for key in keys}})

    def _on_fault(self, source: str, t: float, event: Event) -> None:
        del source
        where = [str(name) for name in event.get("where", ())]
        what = str(event.get("what", ""))
        kind = "recovery" if what in ("heal", "start", "join", "unslow") else "fault"
        told = {"lost": "rounds continue without"}.get(what, what)
        self._tell(t, f"{told} {' - '.join(where)}".strip(), kind, where)
        for name in where:
            if name in self.sites and what in ("cut", "heal"):
                self.sites[name].cut = what == "cut"
        if what == "lost":
            for name in where:
                self._site(name).connected = False

    def _on_refused(self, source: str, t: float, event: Event) -> None:
        del source
        told = f"an update of {event.get('site')} was refused: {event.get('why')}"
        self._tell(t, told, "fault", [str(event.get("site"))])

    def _on_process(self, source: str, t: float, event: Event) -> None:
        del source, t
        self.processes[str(event["name"])] = {
            "name": event["name"],
            "memory_bytes": event.get("memory_bytes"),
            "cpu": event.get("cpu"),
            "alive": event.get("alive", True),
        }

    def _on_link(self, source: str, t: float, event: Event) -> None:
        """The simulator's totals: what it sent over each link, exactly."""
        del source, t
        first, second = event["between"]
        towards_first, towards_second = event["bytes"]
        server = str((self.recipe.get("server") or {}).get("name", ""))
        if first == server and second in self.sites:
            self.sites[second].up_bytes, self.sites[second].down_bytes = towards_first, towards_second
        elif second == server and first in self.sites:
            self.sites[first].up_bytes, self.sites[first].down_bytes = towards_second, towards_first

    def _on_site(self, source: str, t: float, event: Event) -> None:
        """A site's own totals at its end."""
        del t
        site = self._site(source or event["site"])
        site.waiting_seconds = float(event.get("waiting_seconds", site.waiting_seconds))
        if "up_bytes" in event:
            site.up_bytes, site.down_bytes = event["up_bytes"], event["down_bytes"]
        site.finished = True

    def _on_end(self, source: str, t: float, event: Event) -> None:
        del t
        if source == "":
            self.status = str(event.get("status", "finished"))

    def _tell(self, t: float, what: str, kind: str, where: list[str]) -> None:
        self.faults.append({"t": t, "what": what, "kind": kind, "where": where})

    # -- what the page is given ----------------------------------------------------------------

    def view(self, dollars_gb: float = _DOLLARS_GB) -> dict[str, Any]:
        """The page's data, as JSON has it."""
        up = sum(site.up_bytes for site in self.sites.values())
        down = sum(site.down_bytes for site in self.sites.values())
        dollars = (up + down) / 1e9 * dollars_gb
        hours = self.now / 3600
        return {
            "name": self.name,
            "status": self.status,
            "strategy": self.strategy,
            "parameters": self.parameters,
            "steps": (self.recipe.get("training") or {}).get("steps"),
            "server": (self.recipe.get("server") or {}).get("name", "global server"),
            "t": self.now,
            "rounds": self.round_count,
            "version": self.version,
            "up_bytes": up,
            "down_bytes": down,
            "dollars": dollars,
            "dollars_hour": dollars / hours if hours > 0 else 0.0,
            "loss": {name: thin(points) for name, points in self.losses.items()},
            "accuracy": self.accuracy[-_POINTS:],
            "sites": [self._site_view(site) for site in self.sites.values()],
            "last_round": self.rounds[-1] if self.rounds else None,
            "agreement": self._agreement(),
            "decisions": list(self.decisions)[-20:][::-1],
            "faults": list(self.faults)[-50:][::-1],
            "timeline": self._timeline(),
            "processes": list(self.processes.values()),
        }

    def _site_view(self, site: SiteView) -> dict[str, Any]:
        recent = [moved for moved in site.moved if site.at(moved[0]) > self.now - _RATE_SECONDS]
        seconds = min(_RATE_SECONDS, max(self.now, 1e-9))
        links = self.recipe.get("links") or ()
        link: dict[str, Any] = next((one for one in links if site.name in (one.get("between") or ())), {})
        waits = [wait for wait in site.waits if site.at(wait[0]) > self.now - _WINDOW_SECONDS]
        window = min(_WINDOW_SECONDS, max(self.now, 1e-9))
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
            "exchange_seconds": self._exchange(site),
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
            "cuts": sum(1 for f in self.faults if f["kind"] == "fault" and site.name in f["where"]),
        }

    def _exchange(self, site: SiteView) -> float | None:
        """Seconds from the last push to the end of its round."""
        if not self.rounds or site.offset is None or not site.pushes:
            return None
        number, (left, _) = next(reversed(site.pushes.items()))
        del number
        after = [one["t"] for one in self.rounds if one["t"] >= site.at(left) and site.name in one["senders"]]
        return after[0] - site.at(left) if after else None

    def _agreement(self) -> float | None:
        """The share of equal signs among what two sites sent, where `auto` compares them."""
        compared = [one for one in list(self.rounds)[-9:] if one["common"]]
        common = sum(one["common"] for one in compared)
        return sum(one["same"] for one in compared) / common if common else None

    def _timeline(self) -> dict[str, Any]:
        """Steps, waits and pushes of the last minute, on the server's clock."""
        start = self.now - _WINDOW_SECONDS
        found = []
        for site in self.sites.values():
            if site.offset is None:
                continue
            ends = [(site.at(t), step) for t, step, _ in site.steps if site.at(t) > start]
            waits = [(site.at(t) - s, site.at(t), why) for t, s, why in site.waits if site.at(t) > start]
            steps = []
            for (before, _), (end, step) in pairwise(ends):
                waited = max((w[1] for w in waits if before <= w[1] <= end), default=before)
                steps.append([max(before, waited), end, step])
            pushed = [(site.at(t), n, b) for n, (t, b) in list(site.pushes.items())[-600:] if site.at(t) > start]
            closed = [one["t"] for one in self.rounds if site.name in one["senders"]]
            pushes = [[t, next((c for c in closed if c >= t), self.now), n, b] for t, n, b in pushed]
            found.append({"site": site.name, "steps": steps[-300:], "waits": waits[-300:], "pushes": pushes[-200:]})
        return {"start": max(0.0, start), "end": self.now, "sites": found}


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


def _site_names(recipe: Mapping[str, Any]) -> list[str]:
    found = []
    for entry in recipe.get("sites") or ():
        count, name = entry.get("count"), str(entry.get("name", ""))
        found += [name] if count is None else [name.replace("{}", str(n)) for n in range(1, int(count) + 1)]
    return found

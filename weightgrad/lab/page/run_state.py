"""What is known of a run, from the lines of its event logs and from nothing else.

The clocks of a deployment begin when each process does. A site's clock is put beside the server's by its pushes: none
arrives before it is sent, so the smallest time between a push and the end of its round is the difference of the clocks
and one way of the link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from weightgrad.lab.page.run_reader import Event
from weightgrad.lab.page.site_record import KEPT, SiteRecord

_LOSSES = 1600  # of a site, at most
_SENT_AWAY = {"remove": "removed", "revoke": "revoked"}
_TOLD = 200  # of faults and decisions
_OTHER_CLOCKS = ("process", "evaluate", "network", "site")  # not written by the server, or after the end


class RunState:
    """Everything that is known of a run. `add` takes a line; `run_view.py` makes the page's data of it.

    Args:
        recipe: the recipe of the run, as JSON has it; empty if it is not known.
        name: what to call the run.
    """

    def __init__(self, recipe: Mapping[str, Any], name: str) -> None:
        self.recipe, self.name = recipe, name
        self.sites: dict[str, SiteRecord] = {}
        self.status = "waiting"
        self.strategy = str((recipe.get("strategy") or {}).get("name", "")) if recipe else ""
        self.parameters: int | None = None
        self.now = 0.0
        self.unread = 0  # lines that are not what they should be
        self.rounds: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.round_count = 0
        self.version = 0
        self.losses: dict[str, list[tuple[int, float]]] = {}
        self.accuracy: list[tuple[int, float]] = []
        self.decisions: deque[dict[str, Any]] = deque(maxlen=_TOLD)
        self.faults: deque[dict[str, Any]] = deque(maxlen=_TOLD)
        self.processes: dict[str, dict[str, Any]] = {}
        for name_of_site in _site_names(recipe):
            self._site(name_of_site)

    def _site(self, name: str) -> SiteRecord:
        return self.sites.setdefault(name, SiteRecord(name))

    def add(self, source: str, event: Event) -> None:
        """Take one line of a log."""
        if source:
            self._site(source).told = True
        handler = getattr(self, f"_on_{event['kind']}", None)
        if handler is not None:
            try:
                handler(source, float(event["t"]), event)
            except (
                AttributeError,
                KeyError,
                TypeError,
                ValueError,
            ):  # not what its kind says: a page shows what it can
                self.unread += 1
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
        site.connected, site.removed = True, ""
        self.status = "paused" if self.status == "paused" else "running"

    def _on_connection(self, source: str, t: float, event: Event) -> None:
        del source
        site = self._site(event["site"])
        if (
            site.removed
        ):  # an operator has ended its session: no fault, and what is still on its way brings nothing back
            site.connected = False
            return
        if event.get("up"):
            if site.connected is False:
                self._tell(t, f"the connection of {site.name} is back", "recovery", [site.name])
            site.connected = True
            return
        site.connected = False
        if event.get("left"):
            site.finished = True
        else:
            site.cuts += not site.cut
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
            if len(self.losses[site.name]) > _LOSSES:
                self.losses[site.name] = self.losses[site.name][::2]

    def _on_wait(self, source: str, t: float, event: Event) -> None:
        site = self._site(source or event["site"])
        site.waiting_seconds += float(event["seconds"])
        site.waits.append((t, float(event["seconds"]), str(event.get("why", ""))))

    def _on_push(self, source: str, t: float, event: Event) -> None:
        site = self._site(source)
        site.pushes[int(event["round"])] = t
        while len(site.pushes) > KEPT:
            del site.pushes[next(iter(site.pushes))]

    def _on_encoded(self, source: str, t: float, event: Event) -> None:
        site = self._site(source or event["site"])
        site.encode_seconds, site.residual = float(event["seconds"]), float(event["residual"])
        site.encodes.append((t, site.encode_seconds))
        site.trip_seconds = event.get("trip_seconds")

    def _on_operator(self, source: str, t: float, event: Event) -> None:
        del source
        what, where = str(event.get("what", "")), [str(name) for name in event.get("where", ())]
        self._tell(t, f"{event.get('who', 'the operator')}: {' '.join([what, *where])}", "operator", where)
        if what in ("pause", "resume"):
            self.status = "paused" if what == "pause" else "running"
        for name in where:
            site = self._site(name)
            # A revoked certificate keeps nobody out who comes with a new one; who is removed must be added again.
            site.removed = _SENT_AWAY.get(what, "" if what == "add" else site.removed)
            site.connected = site.connected and not site.removed
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
            site.connected = not site.removed  # a removed site's last push may come late
            site.norm = (event.get("norms") or {}).get(name, site.norm)
            site.step = max(site.step, int(event["step"]))
            sent = site.pushes.get(number)
            if sent is not None:
                site.offset = t - sent if site.offset is None else min(site.offset, t - sent)
                arrivals[name] = site.at(sent)
            size = float((event.get("sizes") or {}).get(name, event["up_bytes"] / len(pushes)))
            site.sizes[number] = size
            site.add_traffic(t, up=size)
        for site in self.sites.values():
            if site.connected is not None and not site.removed:  # who has not come yet is sent nothing
                site.add_traffic(t, down=float(event["down_bytes"]))
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
                self.sites[name].cuts += what == "cut"
        if what == "lost":
            for name in where:
                self._site(name).connected = False

    def _on_refused(self, source: str, t: float, event: Event) -> None:
        del source
        told = f"an update of {event.get('site')} was refused: {event.get('why')}"
        self._tell(t, told, "fault", [str(event.get("site"))])

    def _on_limited(self, source: str, t: float, event: Event) -> None:
        del source
        told = f"an update of {event.get('site')} was limited: {event.get('why')}"
        self._tell(t, told, "warning", [str(event.get("site"))])

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
        site.told = True
        if "up_bytes" in event:
            site.up_bytes, site.down_bytes, site.counted = event["up_bytes"], event["down_bytes"], True
        site.finished = True

    def _on_end(self, source: str, t: float, event: Event) -> None:
        del t
        if source == "":
            self.status = str(event.get("status", "finished"))

    def _tell(self, t: float, what: str, kind: str, where: list[str]) -> None:
        """Note a fault or what is like one; of warnings about the same site that follow one another, the last."""
        told = {"t": t, "what": what, "kind": kind, "where": where, "times": 1}
        last = self.faults[-1] if self.faults else None
        if last is not None and kind == "warning" and (last["kind"], last["where"]) == (kind, where):
            told["times"] = last["times"] + 1
            self.faults.pop()
        self.faults.append(told)


def _site_names(recipe: Mapping[str, Any]) -> list[str]:
    found = []
    for entry in recipe.get("sites") or ():
        if isinstance(entry, str):  # a list of sites
            found.append(entry)
            continue
        count, name = entry.get("count"), str(entry.get("name", ""))
        found += [name] if count is None else [name.replace("{}", str(n)) for n in range(1, int(count) + 1)]
    return found

"""The result as a document: a table over all links, a table for each link, and what is fair and what is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from result_table import ResultTable, Row
from rivals.outcome import Outcome
from rivals.spec import ALONE, OWN, SETTINGS
from rivals.tasks import SITES, WARM, Link, Task
from tables import Claim, Document, difference

TARGET = 0.97  # of what DDP ends with
REFERENCE = "ddp"
SLOW_MBIT = 100.0
LATE = 0.05


@dataclass
class Found:
    """All outcomes, and why others are missing."""

    task: Task
    steps: int
    links: Sequence[Link]
    rivals: Sequence[str]
    parameters: int
    outcomes: list[Outcome] = field(default_factory=list)
    missing: dict[tuple[str, Link], str] = field(default_factory=dict)
    checks: dict[Link, str] = field(default_factory=dict)  # what the emulator measured of each link before it was used
    versions: list[str] = field(default_factory=list)

    def at(self, rival: str, link: Link) -> Outcome | None:
        """The outcome of a rival over a link, or None."""
        wanted = (rival, link.mbit_s, link.rtt_ms)
        return next((x for x in self.outcomes if (x.rival, x.mbit_s, x.rtt_ms) == wanted), None)

    def free(self, link: Link) -> float:
        """Seconds of a step over a WAN that costs nothing: of the run without an exchange, if it is trusted."""
        alone = self.at(ALONE, link)
        return alone.step_seconds if alone is not None and alone.trusted else self.task.seconds

    def target(self, link: Link) -> float | None:
        """The accuracy to reach over this link. If DDP did not finish here, its outcome over another link counts."""
        own = self.at(REFERENCE, link) or next((x for x in self.outcomes if x.rival == REFERENCE), None)
        ends = [own.accuracy] if own is not None else [x.accuracy for x in self.outcomes if x.rival != ALONE]
        return TARGET * max(ends) if ends else None

    def seconds_to(self, rival: str, link: Link) -> float | None:
        """Seconds to the target accuracy; None if it was not reached or the rival was not run."""
        found, target = self.at(rival, link), self.target(link)
        return found.seconds_to(target) if found is not None and target is not None else None


def document(found: Found) -> Document:
    """The whole document."""
    megabytes = 4 * found.parameters / 1e6
    about = found.task
    rests_on = [
        f"{about.model} on {about.data}, {found.parameters:,} parameters ({megabytes:.2f} MB as float32); "
        f"{found.steps} steps of {about.batch} samples over {len(SITES)} sites of one worker, SGD with momentum 0.9, "
        f"rate {about.rate:g} along a cosine, one seed; the same weights, shards and batches for all.",
        f"A pass takes {1e3 * about.seconds:g} ms for everybody: really computed, then waited for, layer by layer.",
        f"Seconds to accuracy: to {TARGET:.0%} of what `{REFERENCE}` ends with, {about.evaluate_on:,} test samples. "
        "Weights are kept at fixed steps and evaluated after the run. One seed, and a standard error of "
        f"{100 * _error(found):.1f} points: times that differ by a few evaluations are the same.",
        f"A step is the mean after the first {WARM:.0%}; bytes are what crossed the link, both ways, headers too.",
        *(f"`{name}`: {SETTINGS[name]}" for name in dict.fromkeys(text.partition(":")[0] for text in found.rivals)),
        *found.versions,
    ]
    return Document(
        title="Rivals in the emulator",
        rests_on=rests_on,
        tables=[_matrix(found, "step"), _matrix(found, "to"), *(_link_table(found, link) for link in found.links)],
        claims=_claims(found),
        measured=list(_FAIR),
        failures=[f"{x}, {link}: {why}" for (x, link), why in found.missing.items() if why.startswith("failed")],
        numbers={
            "outcomes": [one.to_dict() for one in found.outcomes],
            "missing": [{"rival": x, "link": str(link), "why": why} for (x, link), why in found.missing.items()],
            "targets": {str(link): found.target(link) for link in found.links},
        },
    )


def _error(found: Found) -> float:
    """The standard error of an accuracy, from the number of test samples."""
    ends = [one.accuracy for one in found.outcomes] or [0.5]
    share = sum(ends) / len(ends)
    return math.sqrt(share * (1 - share) / found.task.evaluate_on)


def _matrix(found: Found, what: str) -> ResultTable:
    title, about = {
        "step": ("Milliseconds a step", f"A pass is {1e3 * found.task.seconds:g} ms; `{ALONE}` exchanges nothing."),
        "to": ("Seconds to the same accuracy", "A dash: not reached, or no such run."),
    }[what]
    rows: list[Row] = []
    for rival in found.rivals:
        row: Row = {"rival": rival}
        for link in found.links:
            one = found.at(rival, link)
            value = found.seconds_to(rival, link) if what == "to" else one.step_seconds * 1e3 if one else None
            row[str(link)] = None if value is None else f"{value:.1f}{'' if one and one.trusted else '†'}"
        rows.append(row)
    columns = [("", "rival", "{}"), *((str(link), str(link), "{:>}") for link in found.links)]
    notes = [] if all(one.trusted for one in found.outcomes) else ["†: not to be trusted, see below why."]
    return ResultTable(what, title, about, columns, rows, notes)


def _link_table(found: Found, link: Link) -> ResultTable:
    columns = [
        ("", "rival", "{}"),
        ("ms a step", "step_ms", "{:.1f}"),
        ("of a free WAN's speed %", "share", "{:.0f}"),
        ("kB a step", "step_kb", "{:.1f}"),
        ("s to accuracy", "to", "{:.1f}"),
        ("accuracy at the end %", "accuracy", "{:.2f}"),
        ("s in all", "seconds", "{:.1f}"),
        ("emulator", "verdict", "{}"),
    ]
    rows: list[Row] = []
    notes: list[str] = []
    for rival in found.rivals:
        one = found.at(rival, link)
        if one is None:
            rows.append({"rival": rival, "verdict": found.missing.get((rival, link), "not run")})
            continue
        rows.append(
            {
                "rival": rival,
                "step_ms": 1e3 * one.step_seconds,
                "share": 100 * found.free(link) / one.step_seconds,
                "step_kb": one.step_bytes / 1e3,
                "to": found.seconds_to(rival, link),
                "accuracy": 100 * one.accuracy,
                "seconds": one.seconds,
                "verdict": "trusted" if one.trusted else "NOT trusted",
            }
        )
        notes += [f"{rival}: {note}." for note in (*one.notes, *(() if one.trusted else (one.verdict,)))]
    target = found.target(link)
    reach = "" if target is None else f"Accuracy to reach: {100 * target:.2f} %. "
    about = f"{reach}Before the runs: {found.checks.get(link, 'not measured')}."
    return ResultTable(str(link), str(link), about, columns, rows, notes)


def _claims(found: Found, own: str = "auto") -> list[Claim]:
    made = []
    here = [(link, one) for link in found.links if (one := found.at(own, link)) is not None and one.trusted]
    if here:
        shares = {link: found.free(link) / one.step_seconds for link, one in here}
        worst = min(shares, key=lambda link: shares[link])
        made.append(
            Claim(
                f"`{own}` steps at 95 % or more of the speed over a WAN that costs nothing.",
                shares[worst] >= 0.95,
                f"At worst {shares[worst]:.1%}, at {worst}: {1e3 * found.free(worst) / shares[worst]:.1f} ms, "
                f"{1e3 * found.free(worst):.1f} without an exchange.",
            )
        )
    made += [claim for link in found.links if link.mbit_s <= SLOW_MBIT and (claim := _faster(found, own, link))]
    gaps = [
        difference([one.accuracy], [reference.accuracy], found.task.evaluate_on)
        for link, one in here
        if (reference := found.at(REFERENCE, link)) is not None
    ]
    if gaps:
        worst_gap = min(gaps, key=lambda gap: gap.points)
        what = f"`{own}` ends no less accurate than `{REFERENCE}` (0.1 points are allowed)."
        made.append(Claim(what, worst_gap.above(-0.1), f"At worst {worst_gap.text()}."))
    return made


def _faster(found: Found, own: str, link: Link) -> Claim | None:
    ours = found.seconds_to(own, link)
    rivals = [rival for rival in found.rivals if rival not in (*OWN, ALONE)]
    times = {rival: seconds for rival in rivals if (seconds := found.seconds_to(rival, link)) is not None}
    if found.at(own, link) is None or not times:
        return None
    best = min(times, key=lambda rival: times[rival])
    what = f"At {link}, `{own}` reaches the same accuracy 1.5 times as fast as the best rival."
    both = (found.at(own, link), found.at(best, link))
    trusted = all(one is not None and one.trusted for one in both)
    doubt = "" if trusted else " One of the two runs is not to be trusted."
    if ours is None:
        return Claim(what, False if trusted else None, f"It did not reach it; `{best}` in {times[best]:.1f} s.{doubt}")
    times_as = times[best] / ours
    return Claim(what, times_as >= 1.5 if trusted else None, f"{times_as:.2f} times as fast as `{best}`.{doubt}")


_FAIR = (
    "`alone` is two workers that never speak: its accuracy is that of the mean of both, which costs it nothing here. "
    "It is there for its step, and is not counted as a rival.",
    "Measured: time, bytes and accuracy of real processes over real TCP. Emulated: the link, and the length of a pass.",
    "The same single link for all. Two ranks of Gloo send their gradients over it; WeightGrad's global server stands "
    "on the first site's host, so pushes and results of the second site cross the link, and those of the first do not.",
    "In the rivals' favour: they write nothing to disk and encrypt nothing; WeightGrad runs under mutual TLS, and its "
    "server has every round on disk before it sends the result. Bytes of connecting are counted for WeightGrad, and "
    "not for rivals. Where the two models of a local method are apart, the mean of both is evaluated, at no cost; of "
    "WeightGrad it is the global model of the server.",
    "In WeightGrad's favour: the first weights do not cross its link, as both sites make the same from the seed (DDP's "
    "are not counted either).",
    "How settings were chosen: from a few tried on the task `fashion`, one to four runs each on a busy machine, "
    "by this table's own seed and test samples, so in the rivals' favour. Post-local every 4, 8, 16, 32 steps; "
    "DiLoCo every 5, 10, 20 with outer momentum 0.9, as published, and 10, 20, 40 with 0.5; hivemind every 10, "
    "20, 40; DDP with buckets of 25 and 0.3 MB, which was the same. fp16 and PowerSGD have one setting. `--rivals "
    "post-local:period=4` and the like try others. Strategies of WeightGrad are as they are, except that "
    "no site is ever given up; nothing was tried for them here.",
    "hivemind is made for steps of seconds and many peers: two peers with steps of milliseconds are not its best.",
)

"""The result as a document: a matrix over all lines, a table for each, and what is fair and what is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from field_sheet import Row, Sheet
from rivals.outcome import Outcome
from rivals.spec import ALONE, OWN, SETTINGS
from rivals.tasks import SITES, WARM, Line, Task
from tables import Claim, Document, difference

TARGET = 0.97  # of what DDP ends with
REFERENCE = "ddp"
SLOW_MBIT = 100.0
LATE = 0.05


@dataclass
class Found:
    """Everything that was run, and what could not be."""

    task: Task
    steps: int
    lines: Sequence[Line]
    rivals: Sequence[str]
    parameters: int
    outcomes: list[Outcome] = field(default_factory=list)
    missing: dict[tuple[str, Line], str] = field(default_factory=dict)
    checks: dict[Line, str] = field(default_factory=dict)  # what the emulator measured of each line before it was used
    versions: list[str] = field(default_factory=list)

    def at(self, rival: str, line: Line) -> Outcome | None:
        """That cell."""
        wanted = (rival, line.mbit_s, line.rtt_ms)
        return next((x for x in self.outcomes if (x.rival, x.mbit_s, x.rtt_ms) == wanted), None)

    def free(self, line: Line) -> float:
        """Seconds of a step over a WAN that costs nothing: of the run alone, where there is one to be trusted."""
        alone = self.at(ALONE, line)
        return alone.step_seconds if alone is not None and alone.trusted else self.task.seconds

    def target(self, line: Line) -> float | None:
        """The accuracy to reach over this line: DDP's over any, if it could not finish here (its model is the same)."""
        own = self.at(REFERENCE, line) or next((x for x in self.outcomes if x.rival == REFERENCE), None)
        ends = [own.accuracy] if own is not None else [x.accuracy for x in self.outcomes if x.rival != ALONE]
        return TARGET * max(ends) if ends else None

    def seconds_to(self, rival: str, line: Line) -> float | None:
        """To the target; None: never, or there is no such run."""
        found, target = self.at(rival, line), self.target(line)
        return found.seconds_to(target) if found is not None and target is not None else None


def document(found: Found) -> Document:
    """All of it."""
    megabytes = 4 * found.parameters / 1e6
    about = found.task
    rests_on = [
        f"{about.model} on {about.data}, {found.parameters:,} parameters ({megabytes:.2f} MB as float32); "
        f"{found.steps} steps of {about.batch} samples over {len(SITES)} sites of one worker, SGD with momentum 0.9, "
        f"rate {about.rate:g} along a cosine, one seed; the same weights, shards and batches for all.",
        f"A pass takes {1e3 * about.seconds:g} ms for everybody: really computed, then waited for, layer by layer.",
        f"Seconds to accuracy: to {TARGET:.0%} of what `{REFERENCE}` ends with, {about.evaluate_on:,} test samples. "
        "Weights are kept at fixed steps and judged after the clock has stopped. One seed, and a standard error of "
        f"{100 * _error(found):.1f} points: times that are a few looks apart are the same.",
        f"A step is the mean after the first {WARM:.0%}; bytes are what crossed the line, both ways, headers too.",
        *(f"`{name}`: {SETTINGS[name]}" for name in dict.fromkeys(text.partition(":")[0] for text in found.rivals)),
        *found.versions,
    ]
    return Document(
        title="Rivals in the emulator",
        rests_on=rests_on,
        sheets=[_matrix(found, "step"), _matrix(found, "to"), *(_line_sheet(found, line) for line in found.lines)],
        claims=_claims(found),
        measured=list(_FAIR),
        failures=[f"{x}, {line}: {why}" for (x, line), why in found.missing.items() if why.startswith("failed")],
        numbers={
            "outcomes": [one.as_dict() for one in found.outcomes],
            "missing": [{"rival": x, "line": str(line), "why": why} for (x, line), why in found.missing.items()],
            "targets": {str(line): found.target(line) for line in found.lines},
        },
    )


def _error(found: Found) -> float:
    """The standard error of an accuracy, by the number of test samples."""
    ends = [one.accuracy for one in found.outcomes] or [0.5]
    share = sum(ends) / len(ends)
    return math.sqrt(share * (1 - share) / found.task.evaluate_on)


def _matrix(found: Found, what: str) -> Sheet:
    title, about = {
        "step": ("Milliseconds a step", f"A pass is {1e3 * found.task.seconds:g} ms; `{ALONE}` exchanges nothing."),
        "to": ("Seconds to the same accuracy", "A dash: not reached, or no such run."),
    }[what]
    rows: list[Row] = []
    for rival in found.rivals:
        row: Row = {"rival": rival}
        for line in found.lines:
            one = found.at(rival, line)
            value = found.seconds_to(rival, line) if what == "to" else one.step_seconds * 1e3 if one else None
            row[str(line)] = None if value is None else f"{value:.1f}{'' if one and one.trusted else '†'}"
        rows.append(row)
    columns = [("", "rival", "{}"), *((str(line), str(line), "{:>}") for line in found.lines)]
    notes = [] if all(one.trusted for one in found.outcomes) else ["†: not to be trusted, see below why."]
    return Sheet(what, title, about, columns, rows, notes)


def _line_sheet(found: Found, line: Line) -> Sheet:
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
        one = found.at(rival, line)
        if one is None:
            rows.append({"rival": rival, "verdict": found.missing.get((rival, line), "not run")})
            continue
        rows.append(
            {
                "rival": rival,
                "step_ms": 1e3 * one.step_seconds,
                "share": 100 * found.free(line) / one.step_seconds,
                "step_kb": one.step_bytes / 1e3,
                "to": found.seconds_to(rival, line),
                "accuracy": 100 * one.accuracy,
                "seconds": one.seconds,
                "verdict": "trusted" if one.trusted else "NOT trusted",
            }
        )
        notes += [f"{rival}: {note}." for note in (*one.notes, *(() if one.trusted else (one.verdict,)))]
    target = found.target(line)
    reach = "" if target is None else f"Accuracy to reach: {100 * target:.2f} %. "
    about = f"{reach}Before the runs: {found.checks.get(line, 'not measured')}."
    return Sheet(str(line), str(line), about, columns, rows, notes)


def _claims(found: Found, own: str = "auto") -> list[Claim]:
    made = []
    here = [(line, one) for line in found.lines if (one := found.at(own, line)) is not None and one.trusted]
    if here:
        shares = {line: found.free(line) / one.step_seconds for line, one in here}
        worst = min(shares, key=lambda line: shares[line])
        made.append(
            Claim(
                f"`{own}` steps at 95 % or more of the speed over a WAN that costs nothing.",
                shares[worst] >= 0.95,
                f"At worst {shares[worst]:.1%}, at {worst}: {1e3 * found.free(worst) / shares[worst]:.1f} ms, "
                f"{1e3 * found.free(worst):.1f} without an exchange.",
            )
        )
    made += [claim for line in found.lines if line.mbit_s <= SLOW_MBIT and (claim := _sooner(found, own, line))]
    gaps = [
        difference([one.accuracy], [reference.accuracy], found.task.evaluate_on)
        for line, one in here
        if (reference := found.at(REFERENCE, line)) is not None
    ]
    if gaps:
        worst_gap = min(gaps, key=lambda gap: gap.points)
        what = f"`{own}` ends no less accurate than `{REFERENCE}` (0.1 points are allowed)."
        made.append(Claim(what, worst_gap.above(-0.1), f"At worst {worst_gap.text()}."))
    return made


def _sooner(found: Found, own: str, line: Line) -> Claim | None:
    ours = found.seconds_to(own, line)
    rivals = [rival for rival in found.rivals if rival not in (*OWN, ALONE)]
    times = {rival: seconds for rival in rivals if (seconds := found.seconds_to(rival, line)) is not None}
    if found.at(own, line) is None or not times:
        return None
    best = min(times, key=lambda rival: times[rival])
    what = f"At {line}, `{own}` is 1.5 times as soon as the best rival at the same accuracy."
    both = (found.at(own, line), found.at(best, line))
    trusted = all(one is not None and one.trusted for one in both)
    doubt = "" if trusted else " One of the two runs is not to be trusted."
    if ours is None:
        return Claim(what, False if trusted else None, f"It did not reach it; `{best}` in {times[best]:.1f} s.{doubt}")
    times_as = times[best] / ours
    return Claim(what, times_as >= 1.5 if trusted else None, f"{times_as:.2f} times as soon as `{best}`.{doubt}")


_FAIR = (
    "`alone` is two workers that never speak: its accuracy is that of the mean of both, which costs it nothing here. "
    "It is there for its step, and is not counted as a rival.",
    "Measured: time, bytes and accuracy of real processes over real TCP. Emulated: the line, and the length of a pass.",
    "The same single line for all. Two ranks of Gloo send their gradients over it; WeightGrad's global server stands "
    "on the first site's host, so pushes and answers of the second site cross the line, and those of the first do not.",
    "In the rivals' favour: they write nothing to disk and encrypt nothing; WeightGrad runs under mutual TLS, and its "
    "server has every round on disk before it answers. Bytes of connecting are not counted for rivals, and are for "
    "WeightGrad. Where the two models of a local method are apart, the mean of both is judged, at no cost; of "
    "WeightGrad it is the server's base.",
    "In WeightGrad's favour: the first weights do not cross its line, as both sites make the same from the seed (DDP's "
    "are not counted either).",
    "How settings were chosen: from a few tried on the task `fashion`, one to four runs each on a busy machine, "
    "by this table's own seed and test samples, so in the rivals' favour. Post-local every 4, 8, 16, 32 steps; "
    "DiLoCo every 5, 10, 20 with outer momentum 0.9, as published, and 10, 20, 40 with 0.5; hivemind every 10, "
    "20, 40; DDP with buckets of 25 and 0.3 MB, which was the same. fp16 and PowerSGD have one setting. `--rivals "
    "post-local:period=4` and the like try others. Rows of WeightGrad are taken as they stand, but that no site "
    "is ever given up; nothing was tried for them here.",
    "hivemind is made for steps of seconds and many peers: two peers with steps of milliseconds are not its best.",
)

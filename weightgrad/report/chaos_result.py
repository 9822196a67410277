"""A chaos run's verdict, on a few lines."""

from __future__ import annotations

from rich.console import Console

from weightgrad.report.figures import seconds_text
from weightgrad.train.chaos_verdict import Verdict


def line(found: Verdict) -> str:
    """In short."""
    word = "good" if found.good else "BAD"
    same = {True: ", the bits of an undisturbed run", False: ", NOT the bits of an undisturbed run", None: ""}
    return (
        f"{word}: {found.events} events, {found.updates_lost} of {found.updates} updates lost, bases "
        f"{'equal' if found.bases_equal else 'DIFFERENT'}{same[found.identical]}; resumed within "
        f"{seconds_text(found.worst_resume_s)}, longest stall {seconds_text(found.worst_stall_s)}"
    )


def show(found: Verdict, console: Console) -> None:
    """All of it, and for a failure the command that does it again."""
    identical = {True: "yes, bit for bit", False: "NO", None: "need not be (it depends on time who waits for whom)"}
    rows = [
        *(("weather", line) for line in found.conditions),
        ("events", str(found.events)),
        ("updates lost", f"{found.updates_lost} of {found.updates}, in {found.rounds} rounds"),
        *([("taken twice", str(found.updates_twice))] if found.updates_twice else []),
        ("bases equal", "yes" if found.bases_equal else "NO"),
        ("undisturbed", identical[found.identical]),
        ("worst resume", f"{seconds_text(found.worst_resume_s)} from the end of an event to the next round"),
        ("worst stall", f"{seconds_text(found.worst_stall_s)} between two rounds"),
        ("world", found.world + ("" if found.trusted is not False else "; its links were not what was asked for")),
        *([("wrong", found.why)] if found.why else []),
        *([("again", found.command)] if not found.good else []),
    ]
    for name, value in rows:
        console.print(f"{name:14}{value}", markup=False, soft_wrap=True)

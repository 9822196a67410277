"""Gloo's own threads, and when it is safe to take the interpreter apart.

A thread that has run a collective still has its tensors to let go of, for which it needs the interpreter. One that asks
for it while the interpreter is ending is thrown out, and the process with it (SIGABRT, "terminate called without an
active exception"; pytorch issue 190489). Destroying the groups ends the threads, but only if nobody else holds a group:
FSDP and device meshes do, and so does a script with a model in a global. What is left then is to wait until the
threads have nothing in their hands.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

_TASKS = Path("/proc/self/task")  # where there is none, no thread is found, and there is nothing to go by
_NAME = "pt_gloo_runloop"
_APART = 0.02  # seconds between two looks: who waits for the interpreter wakes every 5 ms to ask for it again
_AT_MOST = 5.0


def until_quiet() -> bool:
    """Until each of them sleeps and has slept since the last look; False when one did not stop."""
    before, end = dict(_threads()), time.monotonic() + _AT_MOST
    while before:
        time.sleep(_APART)  # here they get the interpreter, if that is what they wait for
        now = dict(_threads())
        if now == before and all(asleep for asleep, _ in now.values()):
            return True
        if time.monotonic() > end:
            return False
        before = now
    return True


def _threads() -> Iterator[tuple[str, tuple[bool, tuple[str, ...]]]]:
    """Of each one: whether it sleeps, and how often it has been put to sleep or woken."""
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        try:
            facts = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
        except OSError:  # it has just ended
            continue
        if facts["Name"] == _NAME:
            switches = (facts["voluntary_ctxt_switches"], facts["nonvoluntary_ctxt_switches"])
            yield task.name, (facts["State"].startswith("S"), switches)

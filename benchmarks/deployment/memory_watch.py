"""The memory of the processes of a long run, looked at every few seconds: whether it stays flat."""

from __future__ import annotations

import resource
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from deployment.live_run import LiveRun, descendants
from deployment.run_checks import Check

_EVERY_S = 5.0
_MOST_GROWTH = 1.1  # of the most in the last third over the most in the first: a process that starts needs less
_FEW = 40  # looks in a third, without which nothing is said


def resident_mb(pid: int) -> float:
    """The memory of a process and all that it has started, in MB; 0 if it has ended."""
    total = 0
    for one in (pid, *descendants(pid)):
        try:
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1])
        except (OSError, IndexError):
            continue
    return total * resource.getpagesize() / 2**20


@dataclass
class MemoryWatch:
    """Looks at the processes of a run until it is left."""

    run: LiveRun
    seen: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """By role: seconds since the beginning, and MB."""

    def __enter__(self) -> MemoryWatch:
        self._over, self._began = threading.Event(), time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            for role, process in list(self.run.processes.running.items()):
                if found := resident_mb(process.pid):
                    self.seen.setdefault(role, []).append((time.monotonic() - self._began, found))

    def thirds(self, role: str) -> list[list[float]]:
        """What was seen of a role in each third of the time."""
        seen = self.seen.get(role, [])
        third = (seen[-1][0] if seen else 0.0) / 3 or 1.0
        return [[mb for at, mb in seen if int(min(at / third, 2)) == number] for number in range(3)]

    def check(self) -> Check:
        """Whether the last third needs no more memory than the first."""
        grown, words = [], []
        for role in self.seen:
            first, _, last = self.thirds(role)
            if len(first) < _FEW or len(last) < _FEW:
                continue
            words.append(f"{role} {max(first):.0f} to {max(last):.0f} MB")
            grown += [role] if max(last) > _MOST_GROWTH * max(first) else []
        return Check("memory is flat", not grown if words else None, ", ".join(words) or "too short to say")

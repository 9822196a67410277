"""Memory and CPU of the processes of a run, written into a log beside its events, so that a page can show them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

from weightgrad.event_log import EventLog
from weightgrad.lab.page.run_reader import PROCESSES

_SECONDS = 2.0


class ProcessSampler:
    """Samples this process and those it has started, every two seconds, until `stop`; only on Linux.

    Args:
        directory: of the run.
        own: the name of this process.
    """

    def __init__(self, directory: Path, own: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._log = EventLog(directory / PROCESSES, replace=True)
        self._own, self._began = own, time.monotonic()
        self._ended = threading.Event()
        self._cpu: dict[int, tuple[float, float]] = {}
        self._thread = threading.Thread(target=self._run, name="process-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop. May be called again."""
        self._ended.set()
        self._thread.join()
        self._log.close()

    def _run(self) -> None:
        while True:
            self.sample()
            if self._ended.wait(_SECONDS):
                return

    def sample(self) -> None:
        """Write one line for each process."""
        for pid, name in processes(self._own):
            with contextlib.suppress(OSError, ValueError, IndexError):
                seconds, memory = _usage(pid)
                now = time.monotonic()
                before, at = self._cpu.get(pid, (seconds, now))
                self._cpu[pid] = (seconds, now)
                cpu = (seconds - before) / (now - at) if now > at else 0.0
                self._log.write("process", now - self._began, name=name, memory_bytes=memory, cpu=round(cpu, 3))


def processes(own: str) -> list[tuple[int, str]]:
    """This process and its descendants that belong to a run, with names: `server`, `virginia`, `virginia 1`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    mine = {os.getpid()}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in mine} - mine
        mine |= more
        grown = bool(more)
    found, counted = [(os.getpid(), own)], dict[str, int]()
    named = {pid: name for pid in sorted(mine - {os.getpid()}) if (name := _name(pid)) is not None}
    starters = {parents[pid] for pid, name in named.items() if named.get(parents[pid]) == name}
    for pid, name in named.items():
        if pid not in starters:  # which only started another, such as a shell in a network namespace
            number = counted.get(name, 0)
            counted[name] = number + 1
            found.append((pid, f"{name} {number}" if number else name))
    return found


def _name(pid: int) -> str | None:
    """What a process does in a run, by its command line; None if nothing."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    if "torch.distributed.run" in words:
        return None  # it only starts the ranks
    if "--site" in words and "train" in words:
        return words[words.index("--site") + 1]
    return "server" if "serve" in words else None


def _usage(pid: int) -> tuple[float, int]:
    """Seconds of CPU so far, and resident bytes."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")

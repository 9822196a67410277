"""Finds and kills the processes of modelled hosts by a mark in their environment.

Modelled hosts are not namespaces, so a mark in the environment tells their processes; children inherit it, whatever
session they move to. As a program (`python -I -S reaper.py TOKEN PIDFD`, standard library only) the reaper waits until
its stdin ends or the process behind the pidfd is gone, and then kills all processes with the token. Without /proc no
mark can be read, and nothing is found.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from pathlib import Path

VARIABLE = "WEIGHTGRAD_EMULATED"


def mark(token: str, host: str) -> dict[str, str]:
    """The environment variable that marks a process of a host."""
    return {VARIABLE: f"{token}/{host}"}


def marked(token: str, host: str | None = None) -> list[int]:
    """The PIDs with the mark of a host; of all hosts if none is named."""
    wanted = f"{VARIABLE}={token}/{host}" if host is not None else f"{VARIABLE}={token}/"
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for setting in (entry / "environ").read_bytes().split(b"\0"):
                text = setting.decode(errors="replace")
                if text == wanted or (host is None and text.startswith(wanted)):
                    found.append(int(entry.name))
    return sorted(found)


def kill_marked(token: str, host: str | None = None) -> None:
    """Kill (-9) marked processes until none is left: one that dies may just have forked."""
    while living := marked(token, host):
        for pid in living:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Wait for the owner to end, then kill all its processes."""
    token, owner = sys.argv[1], int(sys.argv[2])
    select.select([sys.stdin, owner], [], [])
    kill_marked(token)


if __name__ == "__main__":
    main()

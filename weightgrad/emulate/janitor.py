"""Processes by a mark in their environment: how modelled hosts, which are no namespaces, know their own.

A mark is handed down to children, whatever session they move to. As a program (`python -I -S janitor.py TOKEN
PIDFD`, standard library only) it waits until its stdin ends or the process behind the pidfd is gone, and kills all
that bear the token. Without /proc there are no marks to read, and nothing is found.
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
    """What goes into the environment."""
    return {VARIABLE: f"{token}/{host}"}


def marked(token: str, host: str | None = None) -> list[int]:
    """The living processes with that mark; of all hosts if none is named."""
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
    """kill -9 until nobody is left, as what dies may just have forked."""
    while living := marked(token, host):
        for pid in living:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Wait, then clean up."""
    token, owner = sys.argv[1], int(sys.argv[2])
    select.select([sys.stdin, owner], [], [])
    kill_marked(token)


if __name__ == "__main__":
    main()

"""Reads the event logs of a run directory as they grow.

A run has one log of the global server (or of the simulator), and in a deployment one of each site. They are only ever
appended to, so a reader remembers how far it has read. A line that is not whole yet waits for its rest; a log that has
become shorter was begun anew, and so is the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SERVER = ""
"""The source of the lines of the global server, or of the simulator."""
PROCESSES = "processes.jsonl"
FAULTS = "faults.jsonl"

Event = dict[str, Any]


class RunReader:
    """The new lines of a run's logs, each with its source: the name of a site, or SERVER."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._read: dict[Path, int] = {}

    def files(self) -> Iterator[tuple[str, Path]]:
        """The logs that are there now; those of the sites first, so that pushes are known when their rounds close."""
        for path in sorted((self.directory / "state").glob("*/events.jsonl")):
            if path.parent.name != "server":
                yield path.parent.name, path
        yield SERVER, self.directory / "events.jsonl"
        yield SERVER, self.directory / PROCESSES
        yield SERVER, self.directory / FAULTS

    def restarted(self) -> bool:
        """Whether a log has become shorter since it was read; then everything is read again."""
        for path, position in self._read.items():
            size = path.stat().st_size if path.exists() else 0
            if size < position:
                self._read.clear()
                return True
        return False

    def new_events(self) -> Iterator[tuple[str, Event]]:
        """What has been written since the last call."""
        for source, path in self.files():
            position = self._read.get(path, 0)
            try:
                with path.open("rb") as file:
                    file.seek(position)
                    data = file.read()
            except OSError:
                continue
            whole = data.rfind(b"\n") + 1
            self._read[path] = position + whole
            for line in data[:whole].splitlines():
                if (event := _event(line)) is not None:
                    yield source, event


def _event(line: bytes) -> Event | None:
    """One line; None if it is damaged: a page shows what it can."""
    try:
        found = json.loads(line, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
    usable = isinstance(found, dict) and isinstance(found.get("kind"), str) and isinstance(found.get("t"), (int, float))
    return found if usable else None

"""The event log of a run: one JSON object a line, only ever appended to.

    with EventLog(directory / "events.jsonl") as events:
        events.write("step", 1.2, site="virginia", step=12, loss=2.1)

    {"kind":"step","loss":2.1,"site":"virginia","step":12,"t":1.2}

Every line has a `kind` and a time `t` in seconds of the run's own clock. The same run writes the same bytes: keys
are sorted, a float is the shortest text that reads back as the same float, and nothing that depends on the machine
is written. JSON has neither NaN nor infinity: a loss that diverged is written as null.

A line is given to the operating system whole and at once, so that Ctrl-C or a crash leaves whole lines. If the last
line is incomplete all the same, `read` leaves it out.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Any

from weightgrad.errors import RunError


class EventLog:
    """A file of events, open for writing.

    Args:
        path: the file.
        replace: overwrite a file that exists.
        append: continue a file that exists; an incomplete last line is removed.

    Raises:
        RunError: the file exists and neither option was given, or it cannot be written.
    """

    def __init__(self, path: Path | str, *, replace: bool = False, append: bool = False) -> None:
        self.path = Path(path)
        if append:
            _remove_incomplete_line(self.path)
        how = os.O_APPEND if append else os.O_TRUNC if replace else os.O_EXCL
        try:
            # Not blocking, for a FIFO in the way would block for ever; for its owner alone, since it names the sites.
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | how, 0o600)
            # Unbuffered: when the process dies, a buffer would be cut at an arbitrary byte.
            self._file = open(handle, "wb", buffering=0)  # noqa: SIM115
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                self._file.close()
                raise OSError(errno.EINVAL, "something that is not a plain file is in its way")
        except FileExistsError:
            raise RunError(f"{self.path} exists already; choose another directory or remove it") from None
        except OSError as error:
            raise RunError(f"cannot write the event log {self.path}: {error.strerror}") from None

    def write(self, kind: str, t: float, **fields: object) -> None:
        """Append one line.

        Args:
            kind: what kind of event it is.
            t: seconds of the run's own clock; must be finite.
            fields: what else to write; must be JSON.
        """
        if not math.isfinite(t):
            raise ValueError(f"a line of the event log needs a finite time, got {t}")
        line = json.dumps(
            _without_nan({"kind": kind, "t": t, **fields}), sort_keys=True, separators=(",", ":"), allow_nan=False
        )
        rest = memoryview(line.encode() + b"\n")
        before = os.fstat(self._file.fileno()).st_size
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # no half of a line stays
                os.ftruncate(self._file.fileno(), before)
                os.lseek(self._file.fileno(), before, os.SEEK_SET)
            raise

    def close(self) -> None:
        """Close the file. May be called again."""
        self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _remove_incomplete_line(path: Path) -> None:
    """Remove an incomplete last line, so that the next line starts a line of its own."""
    if path.is_file() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        path.write_bytes(data[: data.rfind(b"\n") + 1])


def read(path: Path | str) -> list[dict[str, Any]]:
    """Read all lines of an event log; an incomplete last line is left out.

    Raises:
        RunError: the file cannot be read, or another line is damaged.
    """
    try:
        *lines, last = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise RunError(f"cannot read the event log {path}: {error.strerror}") from None
    found = [_entry(line, path, number) for number, line in enumerate(lines, start=1)]
    if last:
        try:
            _parse(last)
        except ValueError:
            return found
        found.append(_entry(last, path, len(lines) + 1))
    return found


def _entry(line: bytes, path: Path | str, number: int) -> dict[str, Any]:
    try:
        entry = _parse(line)
    except ValueError as error:
        raise RunError(f"{path}, line {number}: not JSON ({error}); the event log is damaged") from None
    if not isinstance(entry, dict):
        raise RunError(f"{path}, line {number}: wanted a JSON object, found {type(entry).__name__}")
    kind, t = entry.get("kind"), entry.get("t")
    if not isinstance(kind, str) or isinstance(t, bool) or not isinstance(t, (int, float)):
        raise RunError(f"{path}, line {number}: wanted a text 'kind' and a number 't', found {kind!r} and {t!r}")
    return entry


def _parse(line: bytes) -> object:
    def refuse(name: str) -> object:
        raise ValueError(f"{name} is not a JSON number")

    try:
        return json.loads(line, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _without_nan(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(inside) for key, inside in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(inside) for inside in value]
    return value

"""The record of a run: one JSON object a line, only ever appended to.

    with Ledger(directory / "ledger.jsonl") as ledger:
        ledger.write("step", 1.2, site="virginia", step=12, loss=2.1)

    {"kind":"step","loss":2.1,"site":"virginia","step":12,"t":1.2}

Every line has a `kind` and a time `t` in seconds of the run's own clock. The same run writes the
same bytes: keys are sorted, floats are the shortest text that reads back as the same float, and
what depends on the machine does not belong here. JSON has no NaN and no infinity: a loss that
diverged is written as null.

A line is handed to the operating system whole, as soon as it is written, so that Ctrl-C or a crash
leaves whole lines. Should the last one be torn all the same, `read` leaves it out.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any

from weightgrad.errors import RunError


class Ledger:
    """Writes a new ledger; refuses to touch one that exists unless told to replace it, or to go on with it."""

    def __init__(self, path: Path | str, *, replace: bool = False, append: bool = False) -> None:
        self.path = Path(path)
        if append:
            _mend(self.path)
        try:
            # Unbuffered: a buffer would be torn at an arbitrary byte when the process dies.
            self._file = open(self.path, "ab" if append else "wb" if replace else "xb", buffering=0)  # noqa: SIM115
        except FileExistsError:
            raise RunError(f"{self.path} exists already; choose another directory or remove it") from None
        except OSError as error:
            raise RunError(f"cannot write the ledger {self.path}: {error.strerror}") from None

    def write(self, kind: str, t: float, **fields: object) -> None:
        """Append one line."""
        if not math.isfinite(t):
            raise ValueError(f"a line of the ledger needs a finite time, got {t}")
        line = json.dumps(
            _without_nan({"kind": kind, "t": t, **fields}), sort_keys=True, separators=(",", ":"), allow_nan=False
        )
        rest = memoryview(line.encode() + b"\n")
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Close the file; safe to call again."""
        self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _mend(path: Path) -> None:
    """Cut off a torn last line, so that what is appended starts a line of its own."""
    if path.exists() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        path.write_bytes(data[: data.rfind(b"\n") + 1])


def read(path: Path | str) -> list[dict[str, Any]]:
    """All lines of a ledger. A torn last line is left out; anything else that is wrong is a RunError."""
    try:
        *lines, last = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise RunError(f"cannot read the ledger {path}: {error.strerror}") from None
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
        raise RunError(f"{path}, line {number}: not JSON ({error}); the ledger is damaged") from None
    if not isinstance(entry, dict):
        raise RunError(f"{path}, line {number}: wanted a JSON object, found {type(entry).__name__}")
    kind, t = entry.get("kind"), entry.get("t")
    if not isinstance(kind, str) or isinstance(t, bool) or not isinstance(t, (int, float)):
        raise RunError(f"{path}, line {number}: wanted a text 'kind' and a number 't', found {kind!r} and {t!r}")
    return entry


def _parse(line: bytes) -> object:
    def refuse(name: str) -> object:
        raise ValueError(f"{name} is not a number of JSON")

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

"""The last answers on disk: a site that comes back hours later, or after the server did, does its steps again.

One file an answer. They are not synced one by one: a file that a power failure tore is not an answer, and
then the site gets the whole base instead.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from weightgrad.errors import WeightGradError
from weightgrad.runtime.saved import cannot_write
from weightgrad.wan.message_bytes import pack, unpack
from weightgrad.wan.messages import Answer

_SUFFIX = ".answer"


class DiskLog:
    """Keeps the newest files, at most `cap` bytes of them, but always the last few."""

    def __init__(self, directory: Path, cap: int, least: int = 4) -> None:
        self._directory, self._cap, self._least = directory, cap, least
        directory.mkdir(parents=True, exist_ok=True)
        self._sizes = {int(p.stem): p.stat().st_size for p in sorted(directory.glob(f"*{_SUFFIX}")) if p.stem.isdigit()}

    def append(self, answer: Answer) -> None:
        """Write the newest, remove what is too old."""
        data = pack(answer)
        temporary = self._directory / f".{answer.version}"
        try:
            temporary.write_bytes(data)
            os.replace(temporary, self._path(answer.version))
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise cannot_write(self._path(answer.version), error) from error
        self._sizes[answer.version] = len(data)
        while len(self._sizes) > self._least and sum(self._sizes.values()) > self._cap:
            self._remove(min(self._sizes))

    def since(self, version: int, now: int) -> tuple[Answer, ...] | None:
        """Read them back; None if one is missing or damaged."""
        found = []
        for number in range(version + 1, now + 1):
            try:
                answer = unpack(self._path(number).read_bytes())
            except (OSError, WeightGradError):
                return None
            if not isinstance(answer, Answer) or answer.version != number:
                return None
            found.append(answer)
        return tuple(found)

    def restart(self, version: int) -> None:
        """Forget answers that the state on disk knows nothing of."""
        for number in [number for number in self._sizes if number > version]:
            self._remove(number)

    def _remove(self, number: int) -> None:
        del self._sizes[number]
        self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:012d}{_SUFFIX}"

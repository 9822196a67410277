"""The last answers, for sites that were away: what they missed is often less than the whole base."""

from __future__ import annotations

from typing import Protocol

from weightgrad.wan.messages import Answer, nbytes


class AnswerLog(Protocol):
    """Remembers answers in the order of their versions, as far back as it can afford."""

    def append(self, answer: Answer) -> None:
        """The newest one."""
        ...

    def since(self, version: int, now: int) -> tuple[Answer, ...] | None:
        """All after that version up to `now`; None when some are forgotten."""
        ...

    def restart(self, version: int) -> None:
        """The server came back at this version: later answers never happened."""
        ...


class MemoryLog:
    """Keeps answers as long as together they are smaller than `cap` bytes; with `kept`, as if they were on a disk."""

    def __init__(self, cap: int, *, kept: bool = False) -> None:
        self._cap, self._kept = cap, kept
        self._answers: list[Answer] = []
        self._bytes = 0

    def append(self, answer: Answer) -> None:
        """The newest one; the oldest may have to go."""
        self._answers.append(answer)
        self._bytes += nbytes(answer)
        while self._answers and self._bytes > self._cap:
            self._bytes -= nbytes(self._answers.pop(0))

    def since(self, version: int, now: int) -> tuple[Answer, ...] | None:
        """All after that version, or None."""
        missed = tuple(answer for answer in self._answers if answer.version > version)
        return missed if len(missed) == now - version else None

    def restart(self, version: int) -> None:
        """What was in memory is gone."""
        self._answers = [answer for answer in self._answers if self._kept and answer.version <= version]
        self._bytes = sum(nbytes(answer) for answer in self._answers)

"""The last round results, for sites that were away: what they missed is often smaller than the whole global model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from weightgrad.wire.message_sizes import nbytes
from weightgrad.wire.messages import RoundResult, Segment


class ResultLog(Protocol):
    """Remembers round results in the order of their versions, as far back as it can afford."""

    def append(self, result: RoundResult) -> None:
        """Remember the newest result.

        Args:
            result: the result of the next version.
        """
        ...

    @property
    def first(self) -> int:
        """The oldest version whose result is remembered; larger than every version if there is none."""
        ...

    def since(self, version: int, now: int) -> tuple[RoundResult, ...] | None:
        """The results that a site missed.

        Args:
            version: the version of the global model that the site has.
            now: the present version.

        Returns:
            All results after `version` up to `now`, or None if some are forgotten.
        """
        ...

    def restart(self, version: int) -> None:
        """The server was restored at this version: forget later results, which never happened.

        Args:
            version: the version of the checkpoint.
        """
        ...


MOST_RESULTS = 4096
"""So many results are remembered at most: small ones cost more memory than their bytes."""


class MemoryResultLog:
    """Keeps the newest results in memory, up to a number of bytes.

    Args:
        cap: the bytes that all results together may have.
        kept: whether results survive a restart of the server, as if they were on a disk.
    """

    def __init__(self, cap: int, *, kept: bool = False) -> None:
        self._cap, self._kept = cap, kept
        self._results: list[RoundResult] = []
        self._bytes = 0

    def append(self, result: RoundResult) -> None:
        """Remember the newest result, and forget the oldest ones beyond the limit."""
        relayed = (replace(one, segments=one.segments and _as_it_came(one.segments)) for one in result.relayed)
        result = replace(result, segments=_as_it_came(result.segments), relayed=tuple(relayed))
        self._results.append(result)
        self._bytes += nbytes(result)
        while self._results and (self._bytes > self._cap or len(self._results) > MOST_RESULTS):
            self._bytes -= nbytes(self._results.pop(0))

    @property
    def first(self) -> int:
        """The oldest version; 2**62 without results."""
        return self._results[0].version if self._results else 2**62

    def since(self, version: int, now: int) -> tuple[RoundResult, ...] | None:
        """All results after `version`, or None if some are forgotten."""
        missed = tuple(result for result in self._results if result.version > version)
        return missed if len(missed) == now - version else None

    def restart(self, version: int) -> None:
        """Forget later results, and earlier ones too unless they survive a restart."""
        self._results = [result for result in self._results if self._kept and result.version <= version]
        self._bytes = sum(nbytes(result) for result in self._results)


def _as_it_came(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """The segments without the entries that were read from them in the round: they take six times the bytes."""
    return tuple(replace(segment) for segment in segments)

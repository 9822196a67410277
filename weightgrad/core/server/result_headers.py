"""The last round results without their values, as the global server remembers them for sites that were away.

The values are in the `ResultLog` of each shard, which may keep fewer of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from weightgrad.core.saved_schedule import schedule_from_tensor, schedule_to_tensor
from weightgrad.core.server.result_log import MOST_RESULTS
from weightgrad.wire.message_parts import without_values
from weightgrad.wire.messages import RoundResult

_NONE = 2**62


class ResultHeaders:
    """Results without their values. Memory: a few numbers for each of at most 4096 results."""

    def __init__(self) -> None:
        self._by_version: dict[int, RoundResult] = {}
        self._first = _NONE  # the oldest version whose values every shard still has
        self._first_saved = _NONE  # the same when the checkpoint was made
        self._first_once = _NONE  # that, while the log is read again

    def remember(self, result: RoundResult, first: int) -> None:
        """Add the result of a round that has closed.

        Args:
            result: the result.
            first: the oldest version whose values every shard still has.
        """
        if result.buffers:  # those of before are of no use to anybody
            past = self._by_version
            self._by_version |= {one: replace(old, buffers={}) for one, old in past.items() if old.buffers}
        self._by_version[result.version] = header_of(result)
        self._first = first
        while len(self._by_version) > MOST_RESULTS or min(self._by_version) < min(first, result.version):
            del self._by_version[min(self._by_version)]

    def since(self, version: int, last: int) -> tuple[RoundResult, ...] | None:
        """The results after one version up to the last one, or None if they or their values are forgotten."""
        missed = range(version + 1, last + 1)
        known = all(one in self._by_version for one in missed) and version + 1 >= min(self._first, last + 1)
        return tuple(self._by_version[one] for one in missed) if version >= 0 and known else None

    def were_known(self, version: int) -> bool:
        """Whether the results after a version were known when an input of the log came, which is now read again.

        They are not here any more. But who was sent them was awaited, and who was sent the whole model was not.
        """
        return version >= 0 and version + 1 >= self._first_once

    def read_log(self, *, begins: bool) -> None:
        """Inputs come from the log, from now on or no more."""
        self._first_once = self._first_saved if begins else _NONE

    def from_first(self, last: int) -> tuple[RoundResult, ...] | None:
        """All results since the first global model up to the last one, or None if some are forgotten."""
        if last and not (self._first <= 1 and len(self._by_version) == last):
            return None
        return tuple(self._by_version[one] for one in range(1, last + 1))

    def state(self) -> dict[str, Tensor]:
        """What must survive beside the logs of shards, as tensors: sync schedules by version, and the oldest one."""
        return {"first": torch.tensor(self._first)} | {
            str(version): schedule_to_tensor(result.schedule)
            for version, result in self._by_version.items()
            if result.schedule is not None
        }

    def load(self, state: Mapping[str, Tensor], results: Iterable[RoundResult]) -> None:
        """Restore what `state` returned.

        Args:
            state: the sync schedules by version, and the oldest version that was known.
            results: the last results, as far as all shards still have their values.
        """
        self._by_version = {}
        for result in results:
            saved = state.get(str(result.version))
            schedule = None if saved is None else schedule_from_tensor(saved)
            self._by_version[result.version] = replace(header_of(result), schedule=schedule)
        self._first = min(self._by_version, default=_NONE)
        self._first_saved = int(state["first"]) if "first" in state else _NONE


def header_of(result: RoundResult) -> RoundResult:
    """A result without its values."""
    header = without_values(result)
    assert isinstance(header, RoundResult)
    return header

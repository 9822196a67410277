"""Reading one ahead, with copies that are recorded instead of a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from weightgrad.runtime.model.device_copies import DeviceCopies
from weightgrad.runtime.model.expected_reads import ExpectedReads
from weightgrad.wire.intervals import Intervals

FIRST, SECOND, ELSEWHERE, LAST = (Intervals.of([(start, start + 2)]) for start in range(0, 8, 2))


class Copies:
    """Copies at once, and notes when each was begun and waited for."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def staging_buffers(self) -> list[Any]:
        return []

    def download(self, parts: list[Tensor], buffers: list[Any]) -> Any:
        name = str(int(parts[0][0]))
        self.events.append(f"begin {name}")

        def wait() -> list[Tensor]:
            self.events.append(f"wait {name}")
            return parts

        return SimpleNamespace(wait=wait)


def parts_of(intervals: Intervals) -> list[Tensor] | None:
    start = intervals.spans[0][0]
    return None if intervals == ELSEWHERE else [torch.arange(start, start + 2)]


def expecting(*intervals: Intervals) -> tuple[ExpectedReads, Copies]:
    copies = Copies()
    reads = ExpectedReads(lambda: cast(DeviceCopies, copies), parts_of)
    reads.expect(intervals)
    return reads, copies


def test_the_next_is_on_its_way_while_one_is_used() -> None:
    reads, copies = expecting(FIRST, SECOND, ELSEWHERE, LAST)
    found = [reads.take(one) for one in (FIRST, SECOND, ELSEWHERE, LAST)]
    assert [None if one is None else one[0].tolist() for one in found] == [[0, 1], [2, 3], None, [6, 7]]
    assert copies.events == ["begin 0", "wait 0", "begin 2", "wait 2", "begin 6", "wait 6"]


def test_what_was_not_expected_leaves_the_expected_alone() -> None:
    reads, copies = expecting(FIRST, SECOND)
    assert reads.take(LAST) is None
    assert reads.take(FIRST) is not None
    assert copies.events == ["begin 0", "wait 0", "begin 2"]


def test_before_parameters_change_what_is_on_its_way_is_waited_for() -> None:
    reads, copies = expecting(FIRST, SECOND)
    reads.forget()
    assert copies.events == ["begin 0", "wait 0"]
    assert reads.take(FIRST) is None
    assert reads.take(SECOND) is None

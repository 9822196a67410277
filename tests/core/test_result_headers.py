"""Which results the global server can send again."""

from __future__ import annotations

import torch

from weightgrad.core.server.result_headers import ResultHeaders
from weightgrad.core.server.result_log import MOST_RESULTS, MemoryResultLog
from weightgrad.wire.messages import RoundResult
from weightgrad.wire.sync_schedule import SyncSchedule


def remembered(versions: int, first: int = 1) -> ResultHeaders:
    headers = ResultHeaders()
    for version in range(1, versions + 1):
        headers.remember(RoundResult(version=version, round=version, step=version, included={}), min(first, version))
    return headers


def versions(found: tuple[RoundResult, ...] | None) -> list[int] | None:
    return None if found is None else [result.version for result in found]


def test_results_since_a_version() -> None:
    headers = remembered(5)
    assert versions(headers.since(2, 5)) == [3, 4, 5]
    assert versions(headers.since(5, 5)) == []
    assert headers.since(-1, 5) is None
    assert versions(headers.from_first(5)) == [1, 2, 3, 4, 5]
    assert versions(ResultHeaders().from_first(0)) == []


def test_what_the_shards_have_forgotten_is_not_offered() -> None:
    headers = remembered(5, first=4)
    assert headers.since(2, 5) is None
    assert versions(headers.since(3, 5)) == [4, 5]
    assert headers.from_first(5) is None


def test_only_the_last_buffers_are_kept() -> None:
    headers = ResultHeaders()
    for version in (1, 2):
        buffers = {"mean": torch.ones(2)}
        headers.remember(
            RoundResult(version=version, round=version, step=version, included={}, buffers=buffers), first=1
        )
    assert [bool(result.buffers) for result in headers.since(0, 2) or ()] == [False, True]


def test_schedules_survive_a_checkpoint() -> None:
    headers, schedule = ResultHeaders(), SyncSchedule(4, 2, "fp32")
    results = [RoundResult(version=one, round=one, step=one, included={}) for one in (1, 2)]
    headers.remember(results[0], 1)
    headers.remember(RoundResult(version=2, round=2, step=2, included={}, schedule=schedule), 1)
    again = ResultHeaders()
    again.load(headers.state(), results)
    assert [result.schedule for result in again.since(0, 2) or ()] == [None, schedule]


def test_results_of_few_bytes_are_not_kept_without_end() -> None:
    """Each costs some kilobytes beside its bytes, and the coordinator knows no more of them either."""
    log = MemoryResultLog(1 << 30)
    for version in range(1, MOST_RESULTS + 11):
        log.append(RoundResult(version=version, round=version, step=version))
    assert log.first == 11
    assert log.since(10, MOST_RESULTS + 10) is not None
    assert log.since(9, MOST_RESULTS + 10) is None

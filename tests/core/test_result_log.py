"""What the global server remembers for sites that were away: as many bytes as it may, and no more than bytes."""

from __future__ import annotations

import pytest
import torch

from weightgrad import codecs
from weightgrad.core.server.result_log import MemoryResultLog
from weightgrad.wire.message_sizes import nbytes
from weightgrad.wire.messages import RelayedPush, RoundResult, Segment


def result(version: int, *, relayed: bool) -> RoundResult:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(version))
    codec = codecs.parse("topk(0.1) > sign()")
    segments = (Segment(0, codec.encode(x, codec.init(x), version)[0]),)
    if not relayed:
        return RoundResult(version=version, round=version, step=version, segments=segments)
    pushes = (
        RelayedPush(site="east", round=version, weight=1.0, segments=segments),
        RelayedPush(site="west", round=version, weight=1.0, segments=None),
    )
    return RoundResult(version=version, round=version, step=version, relayed=pushes)


@pytest.mark.parametrize("relayed", [False, True])
def test_what_a_round_has_read_from_a_result_is_not_kept(relayed: bool) -> None:
    """The entries of a sparse segment are kept with it for the round, and are far larger than its bytes."""
    log = MemoryResultLog(1 << 20)
    for version in (1, 2):
        one = result(version, relayed=relayed)
        for segment in one.moves:
            assert segment.entries is not None
        log.append(one)
        kept = log.since(version - 1, version)
        assert kept is not None
        assert nbytes(kept[0]) == nbytes(one)
        assert [push.site for push in kept[0].relayed] == [push.site for push in one.relayed]
        for segment, own in zip(kept[0].moves, one.moves, strict=True):
            assert "entries" not in vars(segment)
            assert torch.equal(segment.payload.body, own.payload.body)


def test_the_oldest_are_forgotten_beyond_the_limit() -> None:
    size = nbytes(result(1, relayed=False))
    log = MemoryResultLog(2 * size + size // 2)
    for version in (1, 2, 3):
        log.append(result(version, relayed=False))
    assert log.first == 2
    assert log.since(0, 3) is None
    assert [one.version for one in log.since(1, 3) or ()] == [2, 3]

"""The local model of a piece is placed while its push is encoded: the same bits as placing all of it afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from weightgrad.codecs import Codec
from weightgrad.core.parts.selectors import Selector
from weightgrad.core.pieces import Piece
from weightgrad.core.site.shard_orders import PushOrder
from weightgrad.core.site.update_shard import UpdateShard
from weightgrad.wire.messages import Segment

from .test_shards import assert_same, run

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "auto": ("auto", {}),
    "weightgrad": ("weightgrad", {"overlap": 1}),
    "codebook": ("sparseloco", {"every": 2, "overlap": 1, "resume": "global_model_and_residual(0.25)"}),
    "dense": ("diloco", {"every": 2, "up": "bf16", "overlap": 1, "resume": "global_model_and_residual(0.25)"}),
}


@pytest.mark.parametrize("name", list(RUNS))
def test_the_same_bits_as_afterwards(name: str) -> None:
    strategy, settings = RUNS[name]
    at_once = UpdateShard._place_at_once
    placed = []

    def counted(self: UpdateShard, piece: Piece, in_flight: Sequence[Segment], share: float) -> bool:
        placed.append(at_once(self, piece, in_flight, share))
        return placed[-1]

    def never(self: UpdateShard, piece: Piece, in_flight: Sequence[Segment], share: float) -> bool:
        del self, piece, in_flight, share
        return False

    several = mock.patch.object(UpdateShard, "_taken_at_once", return_value=False)
    with several, mock.patch.object(UpdateShard, "_place_at_once", counted):
        found = run(strategy, limit=16, **settings)
    with several, mock.patch.object(UpdateShard, "_place_at_once", never):
        assert_same(found, run(strategy, limit=16, **settings))
    assert any(placed)
    assert name != "dense" or not all(placed)  # what is not sparse is placed in several passes


@pytest.mark.parametrize("name", list(RUNS))
def test_one_pass_for_residual_and_place(name: str) -> None:
    strategy, settings = RUNS[name]
    at_once = UpdateShard._taken_at_once
    taken = []

    def counted(self: UpdateShard, order: PushOrder, piece: Piece, selector: Selector, codec: Codec | None) -> bool:
        taken.append(at_once(self, order, piece, selector, codec))
        return taken[-1]

    with mock.patch.object(UpdateShard, "_taken_at_once", counted):
        found = run(strategy, limit=16, **settings)
    with mock.patch.object(UpdateShard, "_taken_at_once", return_value=False):
        assert_same(found, run(strategy, limit=16, **settings))
    assert any(taken)
    assert not all(taken)

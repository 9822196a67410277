"""Orders of rank 0 to the other ranks of a site: what was written is what is read."""

from __future__ import annotations

import pytest
import torch

from weightgrad.core.site.shard_orders import ApplyOrder, LoadOrder, PushOrder
from weightgrad.runtime.site.orders import (
    Abandon,
    Apply,
    Continue,
    Keep,
    Load,
    Measure,
    PushNothing,
    SiteOrder,
    Wait,
    parse,
    to_bytes,
)
from weightgrad.wire.messages import JoinReply
from weightgrad.wire.sync_schedule import SyncSchedule

LOAD = LoadOrder(version=3, step=12, included=2, discards=True, in_flight_share=0.25)

ORDERS: list[SiteOrder] = [
    PushOrder(round=3, step=12),
    PushOrder(round=3, step=12, fragment=2, threshold=0.1 + 0.2, codec="qsgd(bits=4)", in_flight_share=1 / 3),
    PushOrder(round=3, step=12, final=True, places=True, waits=True),
    PushNothing(round=4),
    Measure(),
    Keep(),
    Apply(order=ApplyOrder(version=4, through=-1, in_flight_share=0.5)),
    Apply(order=ApplyOrder(version=4, through=3), rate=0.1),
    Load(order=LOAD, reply=""),
    Wait(),
    Continue(step=12, next_decision=16),
    Abandon(why='the server said "no"\nand more'),
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_what_was_written_is_read(order: SiteOrder) -> None:
    assert parse(to_bytes(order)) == order


def test_a_download_brings_what_its_optimizer_keeps_beside_vectors() -> None:
    schedule = SyncSchedule(every=8, overlap=3, up="bf16")
    scalars = {"0.step": torch.tensor(7.0)}
    reply = JoinReply(version=3, round=4, step=12, included=2, downloads=True, scalars=scalars, schedule=schedule)
    order = parse(to_bytes(Load.of(LOAD, reply)))
    assert isinstance(order, Load)
    assert order.order == LOAD
    found = order.join_reply()
    assert (found.version, found.round, found.step, found.included) == (3, 4, 12, 2)
    assert found.downloads
    assert found.schedule == schedule
    assert torch.equal(found.scalars["0.step"], torch.tensor(7.0))

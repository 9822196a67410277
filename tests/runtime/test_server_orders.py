"""Orders and notes between the processes of a server: what was written is what is read."""

from __future__ import annotations

import json
import math

import pytest
import torch

from weightgrad import codecs
from weightgrad.codecs import Fp32
from weightgrad.core.controller.agreement import Signs
from weightgrad.core.server.close_order import ClosedPart, ClosedPush, CloseOrder
from weightgrad.core.server.push_facts import PushFacts
from weightgrad.errors import ProtocolError
from weightgrad.runtime.server.orders import (
    Admit,
    Begin,
    Close,
    Closed,
    Complete,
    Drop,
    Finish,
    Initialized,
    Note,
    Order,
    Provide,
    Ready,
    Resume,
    Start,
    Started,
    parse,
    to_bytes,
)
from weightgrad.runtime.server.shard_server import CompletePush, Provision
from weightgrad.wire.message_bytes import pack
from weightgrad.wire.messages import RelayedPush, RoundResult, Segment
from weightgrad.wire.sync_schedule import SyncSchedule

SEGMENT = Segment(3, Fp32().encode(torch.ones(4), {}, 0)[0])

PLAIN: list[Order | Note] = [
    Begin(layout=[("weight", [3, 4])], served=[(0, 5), (7, 12)], optimizer=None, sender="east"),
    Begin(layout=[], served=[], optimizer={"name": "SGD", "groups": [{"lr": 0.1}]}, sender="east"),
    Start(),
    Resume(version=-1),
    Drop(site="west", round=7),
    Admit(roster={"names": ["east"]}, drop="west", why="it was removed"),
    Finish(write_model=True),
    Ready(process=1, version=-1, port=7443),
    Initialized(process=1, digest=2**64 - 1, squares=2.5),
    Started(process=2),
]


@pytest.mark.parametrize("message", PLAIN, ids=lambda message: type(message).__name__)
def test_what_was_written_is_read(message: Order | Note) -> None:
    found = parse(to_bytes(message))
    assert type(found) is type(message)
    assert json.loads(json.dumps(vars(found))) == json.loads(json.dumps(vars(message)))


def test_the_closing_of_a_round() -> None:
    pushes = (
        ClosedPush(site="east", round=4, weight=0.1 + 0.2, seen=2),
        ClosedPush(site="west", round=3, weight=1 / 3, seen=1, counts=False),
    )
    result = RoundResult(version=5, round=4, step=16, included={"east": 4}, rate=0.1, segments=(SEGMENT,))
    order = CloseOrder(
        result=result,
        pushes=pushes,
        weight=1e-3,
        down="qsgd(bits=4)",
        relays=True,
        last=True,
        compares=True,
        sites=3,
        receivers={"east": True, "west": False},
    )
    found = parse(to_bytes(Close(order=order)))
    assert isinstance(found, Close)
    assert found.order.pushes == pushes
    assert (found.order.weight, found.order.down, found.order.sites) == (1e-3, "qsgd(bits=4)", 3)
    assert (found.order.relays, found.order.last, found.order.compares) == (True, True, True)
    assert found.order.receivers == {"east": True, "west": False}
    assert found.order.result.included == {"east": 4}
    assert found.order.result.rate == 0.1
    assert found.order.result.segments == (), "values stay where they are"


def test_a_closed_round() -> None:
    relayed = (RelayedPush(site="east", round=4, weight=0.5, segments=(SEGMENT,)),)
    schedule = SyncSchedule(every=8, overlap=3, up="bf16")
    result = RoundResult(version=5, round=4, step=16, relayed=relayed, schedule=schedule)
    part = ClosedPart(
        result=result, digest=2**63 + 1, sizes={"east": 12}, signs=Signs(common=10, same=7), first_result=2**62
    )
    found = parse(to_bytes(Closed(process=1, part=part)))
    assert isinstance(found, Closed)
    assert found.part.digest == part.digest
    assert found.part.sizes == part.sizes
    assert found.part.signs == part.signs
    assert found.part.first_result == 2**62
    assert found.part.result.schedule == schedule
    assert found.part.result.relayed[0].segments == ()
    nothing = ClosedPart(result=RoundResult(version=1, round=1, step=1), digest=0, sizes={}, signs=None, first_result=1)
    again = parse(to_bytes(Closed(process=1, part=nothing)))
    assert isinstance(again, Closed)
    assert again.part.signs is None
    assert pack(again.part.result) == pack(nothing.result)


@pytest.mark.parametrize("squares", [0.1 + 0.2, 0.0, math.nan, math.inf])
def test_a_complete_push(squares: float) -> None:
    """JSON has no NaN; a push that is not finite still says so."""
    facts = PushFacts(squares=squares, numel=9, problem=None if math.isfinite(squares) else "is not finite")
    found = parse(to_bytes(Complete(process=3, push=CompletePush(site="east", round=2, facts=facts, size=77))))
    assert isinstance(found, Complete)
    assert (found.process, found.push.site, found.push.round, found.push.size) == (3, "east", 2, 77)
    assert found.push.facts.problem == facts.problem
    assert found.push.facts.squares == squares or not math.isfinite(squares)
    assert math.isfinite(found.push.facts.squares) == math.isfinite(squares)


@pytest.mark.parametrize("codec", [None, codecs.parse("qsgd(bits=8)")])
def test_what_a_site_is_owed(codec: codecs.Codec | None) -> None:
    owed = Provision(site="west", epoch=None, since=3, codec=codec)
    found = parse(to_bytes(Provide(provision=owed)))
    assert isinstance(found, Provide)
    assert (found.provision.site, found.provision.epoch, found.provision.since) == ("west", None, 3)
    assert str(found.provision.codec) == str(codec)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b"[]", b"7", b"\xff", b'{"kind": "Explode"}', b'{"kind": ["Drop"]}', b'{"kind": "Drop"}',
        b'{"kind": "Drop", "site": 1, "x": 2}', b'{"kind": "Close", "order": 4}', b'{"kind": "Close", "order": {}}',
        b'{"kind": "Close", "order": {"result": "00", "pushes": []}}', b'{"kind": "Closed", "process": 1, "part": {}}',
    ],
)  # fmt: skip
def test_what_is_no_order_is_an_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse(data)

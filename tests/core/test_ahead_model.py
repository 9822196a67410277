"""Sites that share gradients and do not wait: where their local model is, and that nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightgrad.codecs import Fp32
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.site.ahead_model import AheadModel, OwnPush
from weightgrad.core.strategies import find
from weightgrad.errors import StrategyError
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.messages import RoundResult, Segment

from .harness import LAYOUT, Harness, noise

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"lr": 0.1, "momentum": 0.9}),
    ("adamw", {"lr": 0.1, "weight_decay": 0.1}),
    ("adagrad", {"lr": 0.1}),
]
EXACT: dict[str, Any] = {"up": "fp32", "down": "fp32", "hide": 0}


def model(optimizer: tuple[str, dict[str, Any]]) -> GlobalModel:
    return GlobalModel(LAYOUT, noise(99), optimizer=optimizer, rate=lambda step: 0.1 / (1 + step))


def push(number: int, rate: float | None = None) -> OwnPush:
    payload = Fp32().encode(noise(number), {}, 0)[0]
    return OwnPush((Segment.at(Intervals.whole(LAYOUT.numel), payload),), number, rate)


def step(of: GlobalModel, one: OwnPush) -> None:
    of.apply(RoundResult(version=of.version + 1, round=1, step=one.step, segments=tuple(one.segments), rate=one.rate))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=[name for name, _ in OPTIMIZERS])
def test_the_local_model_is_the_global_model_after_steps_with_what_is_in_flight(
    optimizer: tuple[str, dict[str, Any]],
) -> None:
    replica, alone = model(optimizer), model(optimizer)
    ahead = AheadModel(replica)
    memory = ahead.vector.data_ptr()
    for number in (1, 2):
        ahead.advance(push(number))
    assert torch.equal(replica.vector, noise(99)), "the global model has not moved"
    step(replica, push(7, rate=0.3))
    ahead.begin_again([push(2), push(3, rate=0.01)])
    for one in (push(7, rate=0.3), push(2), push(3, rate=0.01)):
        step(alone, one)
    assert torch.equal(ahead.vector, alone.vector)
    assert ahead.vector.data_ptr() == memory
    ahead.begin_again([])
    assert torch.equal(ahead.vector, replica.vector)


def test_an_empty_push_takes_no_step() -> None:
    replica = model(OPTIMIZERS[1])
    ahead = AheadModel(replica)
    ahead.advance(OwnPush((), 1, 0.1))
    assert torch.equal(ahead.vector, replica.vector), "weight decay and momentum would have moved it"


def trained(world: Harness, steps: int) -> Tensor:
    for _ in range(steps):
        for name in world.names:
            world.step(name)
        for name in world.names:
            world.drain(name)
    world.finish()
    world.check()
    return world.server.global_model.vector


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=[name for name, _ in OPTIMIZERS])
def test_one_site_alone_predicts_the_mean_exactly(optimizer: tuple[str, dict[str, Any]]) -> None:
    """With one site its own gradient is the mean: however late results are, the model is that of plain training."""
    world = Harness("ahead", sites=1, optimizer=optimizer, overlap=3, **EXACT)
    (end,) = world.ends.values()
    replica = GlobalModel(LAYOUT, noise(99), optimizer=optimizer, rate=lambda step: 0.1)
    for number in range(6):
        assert world.step("site-0")
        step(replica, OwnPush(world.made["site-0", number + 1].segments, number + 1, 0.1))
        assert torch.equal(end.model, replica.vector), "before any result, or with some of them"
        if number % 3 == 2:
            world.drain("site-0")


@settings(max_examples=30)
@given(st.integers(0, 4), st.lists(st.integers(0, 5), max_size=60))
def test_any_order_of_messages_leaves_the_local_model_ahead_of_the_global_model(
    overlap: int, events: list[int]
) -> None:
    world = Harness("ahead", sites=2, optimizer=OPTIMIZERS[1], overlap=overlap, hide=0)
    for event in events:
        name = world.names[event % 2]
        (world.step, world.up, world.down)[event // 2](name)
    for end in world.ends.values():
        end.apply_results()
        again = AheadModel(end._replica)  # type: ignore[arg-type]
        pushes = [end._with_segments(sent.push) for sent in end.coordinator.in_flight]
        again.begin_again(OwnPush(one.segments, one.step, one.rate) for one in pushes)
        assert torch.equal(again.vector, end.model)
        assert len(pushes) <= overlap + 1
    world.finish()
    world.check()


def test_a_restored_site_is_where_it_was() -> None:
    world = Harness("ahead", sites=2, optimizer=OPTIMIZERS[1], overlap=2, hide=0)
    for number in range(5):
        for name in world.names:
            world.step(name)
        if number % 2:
            for name in world.names:
                world.drain(name)
    end = world.ends["site-0"]
    again = world.site("site-0", 5)
    again.load(end.state())
    assert end.in_flight
    assert torch.equal(again.model, end.model)
    assert torch.equal(again.global_model(), end.global_model())


def test_how_late_results_are_does_not_change_what_is_shared() -> None:
    """Conservation for the row of `auto` that shares gradients, under its own controller."""
    strategy = find("auto").with_optimizer("adamw", near=True)
    assert (strategy.shares, strategy.resume) == ("gradients", "ahead")
    row: dict[str, Any] = dict(find("auto").near)
    world = Harness("auto", sites=3, optimizer=OPTIMIZERS[1], **row)
    trained(world, 8)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("baseline", {"overlap": 2}, "resume = 'ahead'"),
        ("diloco", {"resume": "ahead"}, "shares = 'gradients'"),
        ("qsgd", {"resume": "mix(0.5)"}, "shares = 'updates'"),
        ("auto", {"nonlinear": {"every": 3}}, "no part 'every'"),
        ("auto", {"near": {"shares": "gradients"}}, "resume"),
        ("auto", {"near": {"nonlinear": {}}}, "no part"),
        ("auto", {"nonlinear": 3}, "table of parts"),
    ],
)
def test_what_does_not_fit_together_is_refused(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(StrategyError, match=says):
        find(name, changes)


@pytest.mark.parametrize("kind", ["sgd", "SGD", "ASGD", "lars", "Lars", "adamw", "AdamW", "Muon", "Adagrad"])
def test_auto_goes_by_the_optimizer_and_by_the_links(kind: str) -> None:
    rows = [find("auto").with_optimizer(kind, near=near) for near in (False, True)]
    wanted = [("updates", "mean"), ("updates", "mean")]
    if kind.lower() not in ("sgd", "asgd", "lars"):
        wanted = [("updates", "sender_mean"), ("gradients", "mean")]
    assert [(row.shares, row.aggregator.split("(")[0]) for row in rows] == wanted
    assert not any(row.nonlinear or row.near for row in rows)
    chosen = find("auto", {"shares": "updates"}).with_optimizer(kind, near=True)
    assert (chosen.shares, chosen.aggregator) == ("updates", "mean"), "who says so has chosen"
    assert find("baseline").with_optimizer(kind, near=True) == find("baseline")

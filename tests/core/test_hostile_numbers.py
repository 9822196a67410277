"""What a site says about itself is believed as far as the consistency, the trigger and the other sites bear it out."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import pytest
import torch

from weightgrad import codecs
from weightgrad.codecs import Payload
from weightgrad.core.agreed_numbers import MOST_WEIGHT
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.server.guard import CREDIT, Guard
from weightgrad.core.server.membership import FAULTS, FIRST_ASIDE
from weightgrad.core.server.state import ServerState
from weightgrad.core.server.strategy import LIVES
from weightgrad.core.shared_buffers import combined
from weightgrad.core.strategies import available, find
from weightgrad.errors import ProtocolError, StrategyError
from weightgrad.kernels import fixed
from weightgrad.wire.messages import Join, Push, Segment

from .harness import LAYOUT, Harness, noise
from .test_guard import START, UNIT, push

LARGEST = 2**32 - 1
CODECS = [
    *("fp32", "fp16", "bf16", "qsgd(bits=4, bucket=32)", "elias(bits=4, bucket=32)", "terngrad()", "lossaware(bits=5)"),
    *("onebit(feedback=False)", "adaptive(pi=4, feedback=False)", "topk(0.3)", "topk(0.3) > sign()", "sign()"),
    *("topk(0.3) > qsgd(bits=4, bucket=32)", "powersgd(2)", "codebook(bits=3)"),
]


def server(name: str = "diloco", sites: str = "abc", **changes: Any) -> ServerState:
    rows = {"every": 1, "aggregator": "mean"} if name == "diloco" else {}
    strategy = find(name, {**rows, **changes})
    optimizer = ("sgd", {"lr": 0.1, "momentum": 0.0}) if strategy.shares == "gradients" else None
    model = GlobalModel(LAYOUT, START, optimizer=optimizer, rate=lambda step: 0.1)
    made = ServerState(model, strategy.for_server(), 1, Guard())
    for site in sites:
        made.receive(Join(site=site, version=0), 0.0)
    return made


@pytest.mark.parametrize("consistency", ["sync", "bounded(2)", "backup(1)", "async_()"])
@pytest.mark.parametrize("changes", [{"round_": LARGEST, "after": 0}, {"step": LARGEST}], ids=["round", "step"])
def test_a_number_that_no_site_can_have_changes_nothing(consistency: str, changes: dict[str, Any]) -> None:
    one = server(consistency=consistency)
    before = {name: tensor.clone() for name, tensor in one.checkpoint().items()}
    with pytest.raises(ProtocolError, match="it cannot be"):
        one.receive(push(**{"round_": 1, "update": UNIT, "site": "a", "seen": 0, **changes}), 0.0)
    after = one.checkpoint()
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for site in "abc":
        one.receive(push(1, UNIT, site=site), 0.0)
    assert one.coordinator.version >= 1
    assert one.coordinator.step == 1


@pytest.mark.parametrize("name", available())
def test_no_honest_site_has_such_numbers(name: str) -> None:
    """With every strategy, sites that are as fast as they may be, and one that comes late again and again."""
    world = Harness(name, sites=2)
    fast, slow = world.names
    for number in range(30):
        while world.step(fast):
            world.up(fast)
        if number % 7 == 3:
            world.crash_site(slow)
        world.step(slow)
        world.drain(slow)
        world.drain(fast)
    world.finish()


def test_a_site_that_was_restarted_again_and_again_has_pushes_for_only_so_many_rounds() -> None:
    one = server()
    for number in range(1, LIVES + 1):
        one.receive(push(number, UNIT, site="a", seen=0), 0.0)
    with pytest.raises(ProtocolError, match="cannot be further than"):
        one.receive(push(LIVES + 1, UNIT, site="a", seen=0), 0.0)


# -- weights --------------------------------------------------------------------------------


def test_claimed_samples_weigh_at_most_ten_times_the_median() -> None:
    one = server()
    one.coordinator.checks.guard = None  # which would limit such a push further
    for site, samples in (("a", 4), ("b", 4), ("c", LARGEST)):
        one.receive(push(1, noise(1) if site == "c" else noise(2), site=site, samples=samples), 0.0)
    torch.testing.assert_close(one.global_model.vector, START + (2 * noise(2) + MOST_WEIGHT * noise(1)) / 12)


def test_samples_of_the_first_push_are_no_unit_for_the_others() -> None:
    """Where each push is a round of its own: with a unit of 2**32 - 1 nobody else would move anything."""
    one = server(consistency="async_()")
    one.receive(push(1, None, site="a", samples=LARGEST), 0.0)
    for site in "bc":
        one.receive(push(1, UNIT, site=site, seen=0, samples=4), 0.0)
    torch.testing.assert_close(one.global_model.vector, START + 2 * UNIT / 3, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("update", [torch.zeros(LAYOUT.numel), 1e-3 * UNIT, None], ids=["zeros", "little", "empty"])
def test_a_site_that_adds_nothing_cannot_thin_out_what_the_others_add(update: torch.Tensor | None) -> None:
    """It claims many samples, by which the mean is divided."""
    one = server()
    for number in range(1, 6):
        for site, samples in (("a", 4), ("b", 4), ("c", LARGEST)):
            one.receive(push(number, update if site == "c" else UNIT, site=site, samples=samples), 0.0)
    along = float(torch.dot(one.global_model.vector - START, UNIT))
    assert along >= 5 * 2 / (2 + 3) - 1e-4, "2 of 5 at least, and not 2 of 12"


# -- learning rates -------------------------------------------------------------------------


def rates(one: ServerState, number: int, **stated: float) -> float | None:
    for site, rate in stated.items():
        out = one.receive(push(number, UNIT, site=site, rate=rate), 0.0)
    (closed,) = out.closed
    return closed.result.rate


def test_the_rate_of_a_round_is_a_median() -> None:
    one = server("baseline")
    assert rates(one, 1, a=0.1, b=0.1, c=1e5) == 0.1
    assert rates(one, 2, a=0.1, b=0.1, c=0.0) == 0.1
    assert rates(one, 3, a=0.0, b=0.1, c=0.1) == 0.1


def test_of_two_sites_the_rate_nearer_to_the_last_one_holds() -> None:
    one = server("baseline", sites="ab")
    assert rates(one, 1, a=0.1, b=1e5) == 0.1
    assert rates(one, 2, a=0.1, b=1e-9) == 0.1
    assert rates(one, 3, a=0.09, b=1e-9) == 0.09, "it may fall as the training goes on"


@pytest.mark.parametrize("rate", [1e39, 1e300])
def test_a_rate_beyond_all_reason_is_refused(rate: float) -> None:
    with pytest.raises(ProtocolError, match="learning rate"):
        server("baseline").receive(push(1, UNIT, site="a", rate=rate), 0.0)


def test_a_push_that_is_a_round_of_its_own_cannot_have_a_rate_far_from_the_others() -> None:
    one = server("baseline", consistency="async_()")
    for site in "ab":
        assert rates(one, 1, **{site: 0.1}) == 0.1
    assert rates(one, 1, c=1e5) == 0.1
    assert rates(one, 2, a=0.15) == 0.15, "its own, if it is not"


# -- values -----------------------------------------------------------------------------------


def changed(payload: Payload, at: int, value: float) -> Payload | None:
    """A payload with another number at this place of its parameters and its body; None behind its end."""
    data, number = bytearray(payload.params + payload.body.numpy().tobytes()), struct.pack("<f", value)
    if at + len(number) > len(data):
        return None
    data[at : at + len(number)] = number
    cut = len(payload.params)
    body = torch.frombuffer(data, dtype=torch.uint8)[cut:].clone()
    return replace(payload, params=bytes(data[:cut]), body=body)


@pytest.mark.parametrize("spec", CODECS)
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e-45, 3e38], ids=str)
def test_no_number_within_a_payload_spoils_the_model_or_stops_the_round(spec: str, value: float) -> None:
    """Scales, codebooks and counts: what cannot be decoded or is not finite is refused, and the others go on."""
    codec = codecs.parse(spec)
    payload, _ = codec.encode(0.1 * noise(3), codec.init(noise(3)), 5)
    for at in range(0, 36, 3):
        lie = changed(payload, at, value)
        if lie is None:
            break
        one = server()
        for site in "ab":
            one.receive(push(1, 0.1 * noise(1), site=site), 0.0)
        out = one.receive(replace(push(1, site="c"), segments=(Segment(0, lie),)), 0.0)
        assert [closed.result.version for closed in out.closed] == [1]
        assert bool(one.global_model.vector.isfinite().all())
        assert float((one.global_model.vector - START).norm()) < 5.0


# -- growth, and the bound in the documentation ------------------------------------------------


@pytest.mark.parametrize("claims", [4, LARGEST])
def test_what_one_site_can_do_to_the_model_in_a_round_and_in_a_run(claims: int) -> None:
    """docs/security.md: with three sites it adds at most CREDIT + 1.5 R of what is usual, whatever it claims."""
    for most in (1.4, 1.5, 2.9, 5.0, 19.9):
        one, honest = server(), server()
        for number in range(1, 61):
            lie = 1e6 if number % 10 == 1 else most  # now and then it tries more
            for site, update in (("a", UNIT), ("b", UNIT), ("c", -lie * UNIT)):
                one.receive(push(number, update, site=site, samples=claims if site == "c" else 4), 0.0)
            for site in "ab":
                honest.receive(push(number, UNIT, site=site), 0.0)
            honest.receive(push(number, None, site="c"), 0.0)
        along = float(torch.dot(one.global_model.vector - START, UNIT))
        assert along > 60 * (2 - 1.5) / 3.5 - CREDIT["updates"], "the others decide where the model goes"
        moved = float((one.global_model.vector - honest.global_model.vector).norm())
        assert moved <= 60 * 1.5 + CREDIT["updates"]


# -- set aside ------------------------------------------------------------------------------


def test_a_site_that_is_refused_again_and_again_is_set_aside_and_said_so() -> None:
    one, said = server(), []
    for number in range(1, FAULTS + 2):
        for site, norm in (("a", 1.0), ("b", 1.0), ("c", 1e5)):
            said += one.receive(push(number, norm * UNIT, site=site), 0.0).aside
    assert said == ["c"]
    assert one.coordinator.members.awaited == ["a", "b"]
    number += 1
    one.receive(push(number, UNIT, site="a"), 0.0)
    assert one.receive(push(number, UNIT, site="b"), 0.0).closed, "nobody waits for c"


def test_a_site_that_joins_and_vanishes_in_every_round_costs_three_waits() -> None:
    one, now, waits = server(t_global=10), 0.0, 0
    for number in range(1, 30):
        one.receive(Join(site="c", version=number - 1), now)
        for site in "ab":
            out = one.receive(push(number, UNIT, site=site), now)
        if not out.closed:
            waits += 1
            now += 10
            out = one.wake(now)
        assert [closed.result.round for closed in out.closed] == [number]
    assert waits == FAULTS
    assert "c" in one.coordinator.members.listening, "results still go to it"


def test_what_a_site_sends_that_is_set_aside_counts_and_it_is_taken_back() -> None:
    one = server(t_global=10)
    member = one.coordinator.members.by_name["c"]
    for _ in range(FAULTS):
        one.coordinator.members.fault("c")
    assert member.aside == FIRST_ASIDE
    for number in range(1, FIRST_ASIDE + 1):
        for site in "cab":
            out = one.receive(push(number, UNIT, site=site), 0.0)
        assert "c" in out.closed[0].senders
    assert member.aside == 0
    assert "c" in one.coordinator.members.awaited
    for _ in range(FAULTS):
        one.coordinator.members.fault("c")
    assert member.aside == 2 * FIRST_ASIDE, "the next time it takes longer"


def test_the_last_round_does_not_wait_for_a_site_that_is_set_aside() -> None:
    one = server()
    for _ in range(FAULTS):
        one.coordinator.members.fault("c")
    one.receive(push(1, UNIT, site="a", final=True), 0.0)
    assert one.receive(push(1, UNIT, site="b", final=True), 0.0).closed


def test_the_standing_of_a_site_survives_a_checkpoint() -> None:
    one, again = server(), server(sites="")
    for _ in range(FAULTS + 1):
        one.coordinator.members.fault("c")
    again.restore(one.checkpoint())
    found, saved = (state.coordinator.members.by_name["c"] for state in (again, one))
    assert (found.aside, found.faults, found.times_aside) == (saved.aside, saved.faults, saved.times_aside)


# -- robust aggregation ---------------------------------------------------------------------


def robust(name: str) -> str:
    """The aggregator of a strategy with a limit."""
    word, _, rest = find(name).aggregator.partition("(")
    return f"{word}({rest[:-1]}, limit=1)" if rest else f"{word}(limit=1)"


@pytest.mark.parametrize("name", available())
def test_with_a_limit_every_strategy_goes_on_beside_a_site_that_sends_minus_five_times_its_update(name: str) -> None:
    world = Harness(name, sites=3, aggregator=robust(name))
    honest, *_, liar = world.names
    for _ in range(40):
        for site in world.names:
            world.step(site)
            for message in list(world.to_server[site]) if site == liar else ():
                if isinstance(message, Push) and message.segments:
                    whole = torch.zeros(LAYOUT.numel)
                    for segment in message.segments:
                        segment.into(whole, fixed.ADD)
                    (lie,) = push(1, -5 * whole).segments
                    world.to_server[site][world.to_server[site].index(message)] = replace(message, segments=(lie,))
        for site in world.names:
            world.drain(site)
        assert bool(world.server.global_model.vector.isfinite().all())
    assert world.ends[honest].version > 0


def test_minus_five_times_its_update_cannot_turn_the_model_round() -> None:
    for aggregator, guard, turned in (
        ("mean", None, True),
        ("mean", Guard(), False),
        ("mean(limit=1)", None, False),
        ("median", None, False),
        ("trimmed_mean(1)", None, False),
    ):
        one = server(aggregator=aggregator)
        one.coordinator.checks.guard = guard
        for number in range(1, 6):
            for site, scale in (("a", 1.0), ("b", 1.0), ("c", -5.0)):
                one.receive(push(number, scale * UNIT, site=site), 0.0)
        assert one.coordinator.version == 5
        along = float(torch.dot(one.global_model.vector - START, UNIT))
        assert (along < 0) == turned, aggregator


def test_outer_optimizers_can_step_with_a_median() -> None:
    one = server(aggregator="outer('sgd', lr=1.0, momentum=0.0, of='median')")
    for site, scale in (("a", 1.0), ("b", 1.0), ("c", -5.0)):
        one.receive(push(1, scale * UNIT, site=site), 0.0)
    torch.testing.assert_close(one.global_model.vector, START + UNIT)
    with pytest.raises(StrategyError, match="of = 'mode'"):
        find("diloco", {"aggregator": "outer(of='mode')"})


def test_a_limit_needs_rounds_of_several_pushes() -> None:
    with pytest.raises(StrategyError, match="compares the pushes of a round"):
        find("diloco", {"aggregator": "mean(limit=1)", "consistency": "async_()"})


# -- buffers --------------------------------------------------------------------------------


def test_the_buffers_of_one_site_cannot_take_over_those_of_all() -> None:
    """Batch norm's statistics ride on pushes; their mean is weighted by what sites state."""
    usual = {"mean": torch.ones(4), "count": torch.tensor(7)}
    huge = {"mean": torch.full((4,), 1e30), "count": torch.tensor(2**62)}
    found = combined([(4, usual), (4, usual), (4, huge)])
    assert torch.equal(found["mean"], usual["mean"])
    assert int(found["count"]) == 7
    weighty = combined([(4, usual), (4, usual), (LARGEST, {"mean": torch.full((4,), 7.0)})])
    torch.testing.assert_close(weighty["mean"], torch.full((4,), (2 + 2 * 7) / 4)), "as much as both others, not more"


@pytest.mark.parametrize(
    "lie",
    [
        {"var": torch.full((4,), 99.0)},
        {"var": torch.full((4,), -3.0)},
        {"mean": torch.full((4,), 1e30)},
        {"mean": torch.full((4,), -1e-3)},
        {"another": torch.ones(4)},
        {"count": torch.tensor(2**63 - 1)},
        {"count": torch.tensor(-(2**63))},
    ],
    ids=["variance", "negative variance", "not zero", "a little", "another name", "large count", "small count"],
)
def test_buffers_that_no_other_site_has_anything_like_are_left_out(lie: dict[str, torch.Tensor]) -> None:
    usual = {"var": torch.ones(4), "mean": torch.zeros(4), "count": torch.tensor(7)}
    found = combined([(4, usual), (4, usual), (LARGEST, {**usual, **lie})])
    assert found.keys() == usual.keys()
    assert all(torch.equal(found[name], usual[name]) for name in usual)


def test_buffers_of_honest_sites_may_differ() -> None:
    first, second, third = (
        {"var": torch.tensor([0.3, 1.0]) * scale, "mean": torch.tensor([-1.0, 1.0]) * scale}
        for scale in (1.0, 2.0, 9.0)
    )
    found = combined([(4, first), (4, second), (4, third)])
    torch.testing.assert_close(found["var"], torch.tensor([0.3, 1.0]) * 4)
    torch.testing.assert_close(found["mean"], torch.tensor([-1.0, 1.0]) * 4)


# -- buffers ----------------------------------------------------------------------------------------


def test_a_buffer_of_another_shape_does_not_displace_that_of_the_others() -> None:
    honest = {"running_mean": torch.ones(3)}
    found = combined([(1, {"running_mean": torch.ones(9)}), (1, honest), (1, honest)])
    assert torch.equal(found["running_mean"], torch.ones(3))

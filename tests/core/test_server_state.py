"""The global server, message by message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from weightgrad import codecs
from weightgrad.codecs import Fp32
from weightgrad.core.controller.update_controller import Controller
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.server.result_log import MemoryResultLog
from weightgrad.core.server.state import Outbox, ServerState
from weightgrad.core.strategies import find
from weightgrad.errors import ProtocolError
from weightgrad.kernels import fixed
from weightgrad.wire.messages import (
    Join,
    JoinReply,
    Leave,
    Message,
    Push,
    RoundRequest,
    RoundResult,
    Segment,
    ServerRestarted,
)
from weightgrad.wire.sync_schedule import Report

from .harness import LAYOUT, Harness, noise

N = LAYOUT.numel
START = noise(99)


def server(name: str = "diloco", sites: str = "abc", *, gradients: bool = False, **changes: Any) -> ServerState:
    settings = {"aggregator": "mean", **changes} if name == "diloco" else changes
    strategy = find(name, settings)
    optimizer = ("sgd", {"lr": 1.0}) if gradients else None
    made = ServerState(GlobalModel(LAYOUT, START, optimizer=optimizer, rate=lambda step: 1.0), strategy.for_server(), 1)
    for site in sites:
        made.receive(Join(site=site, version=0), 0.0)
    return made


def push(site: str, round_: int, update: Tensor | None = None, **more: Any) -> Push:
    settings = {"after": round_ - 1, "step": 8 * round_, "seen": round_ - 1, "samples": 4, **more}
    segments = () if update is None else (Segment(0, Fp32().encode(update, {}, 0)[0]),)
    return Push(site=site, round=round_, segments=segments, **settings)


def to(out: Outbox, site: str, kind: type[Message] = RoundResult) -> list[Any]:
    return [message for name, message in out.messages if name == site and isinstance(message, kind)]


def weights_of(reply: JoinReply) -> Tensor:
    """The weights of a download."""
    found = torch.full((N,), float("nan"))
    for part in reply.parts:
        assert part.version == reply.version
        for segment in part.segments if part.vector == "weights" else ():
            segment.into(found, fixed.STORE)
    return found


def moved(one: ServerState) -> Tensor:
    return one.global_model.vector - START


# -- what `auto` sees of the pushes ---------------------------------------------------------


@pytest.mark.parametrize(("other", "every"), [(1.0, 4), (-1.0, 2)])
def test_sites_that_contradict_each_other_are_told_to_speak_twice_as_often(other: float, every: int) -> None:
    """By the pushes as they came; the counts are in the round's line, and a restarted server knows them."""
    one, codec = server("auto", "ab"), codecs.parse("topk(0.5) > sign()")
    for number in range(1, 13):
        for site, sign in (("a", 1.0), ("b", other)):
            segment = Segment(0, codec.encode(sign * noise(number), {}, 0)[0])
            came = replace(push(site, number), segments=(segment,), report=Report(0.03, max(0, number - 1), 0.05))
            out = one.receive(came, 0.1 * number)
        (closed,) = out.closed
        if number in (10, 11):
            assert closed.signs is None, "after the first few not every round is looked at"
            continue
        sent = max(1, round(N * 0.5))
        assert closed.signs == (sent, sent if other > 0 else 0)
        assert closed.to_dict().items() >= {"common": sent, "same": closed.signs.same}.items()
    assert one.controller is not None
    assert one.controller.now.schedule.every == every
    again = server("auto", "")
    again.restore(one.checkpoint())
    assert isinstance(again.controller, Controller)
    assert isinstance(one.controller, Controller)
    assert (again.controller.unlike, again.controller.signs) == (other < 0, one.controller.signs)


def test_strategies_that_do_not_ask_are_not_told_how_alike_pushes_are() -> None:
    one = server(sites="a")
    (closed,) = one.receive(push("a", 1, noise(1)), 0.0).closed
    assert closed.signs is None
    assert "same" not in closed.to_dict()


# -- rounds ---------------------------------------------------------------------------------


def test_a_round_closes_with_its_last_push_and_everybody_gets_the_result() -> None:
    one = server()
    assert not one.receive(push("a", 1, noise(1)), 0.0).messages
    assert not one.receive(push("b", 1), 0.0).closed
    out = one.receive(push("c", 1, noise(2)), 0.0)
    (closed,) = out.closed
    assert closed.senders == ["a", "b", "c"]
    assert closed.result.included == {"a": 1, "b": 1, "c": 1}
    assert closed.digest == one.global_model.digest()
    assert [name for name, _ in out.messages] == ["a", "b", "c"]
    assert one.global_model.version == 1
    torch.testing.assert_close(moved(one), (noise(1) + noise(2)) / 3)


def test_sites_count_by_their_samples() -> None:
    one = server(sites="ab")
    one.receive(push("a", 1, noise(1), samples=4), 0.0)
    one.receive(push("b", 1, noise(2), samples=12), 0.0)
    torch.testing.assert_close(moved(one), (noise(1) + 3 * noise(2)) / 4)


def test_a_push_that_comes_twice_is_included_once() -> None:
    one = server(sites="ab")
    for _ in range(3):
        assert not one.receive(push("a", 1, noise(1)), 0.0).messages
    one.receive(push("b", 1), 0.0)
    torch.testing.assert_close(moved(one), noise(1) / 2)
    assert not one.receive(push("a", 1, noise(1)), 0.0).closed
    assert one.global_model.version == 1


def test_a_push_whose_predecessor_was_lost_is_not_included_but_asked_for_again_in_order() -> None:
    one = server(sites="ab", consistency="bounded(2)")
    (reply,) = to(one.receive(push("a", 2, noise(2), seen=0), 0.0), "a", JoinReply)
    assert reply.included == 0
    one.receive(push("a", 1, noise(1), seen=0), 0.0)
    one.receive(push("a", 2, noise(2), seen=0), 0.0)
    one.receive(push("b", 1, seen=0), 0.0)
    torch.testing.assert_close(moved(one), noise(1) / 2)
    one.receive(push("b", 2), 0.0)
    torch.testing.assert_close(moved(one), (noise(1) + noise(2)) / 2)


def test_a_late_push_joins_the_round_that_is_open() -> None:
    one = server(consistency="backup(1)")
    one.receive(push("a", 1, noise(1)), 0.0)
    out = one.receive(push("b", 1, noise(2)), 0.0)
    assert out.closed[0].senders == ["a", "b"]
    assert to(out, "c"), "the late site hears of it too"
    assert not one.receive(push("c", 1, noise(3), seen=0), 0.0).closed
    assert not one.receive(push("a", 2), 0.0).closed, "a round with what is late waits for as many of its own"
    out = one.receive(push("b", 2), 0.0)
    assert out.closed[0].result.included == {"a": 2, "b": 2, "c": 1}
    torch.testing.assert_close(moved(one), (noise(1) + noise(2)) / 2 + noise(3) / 3)


def test_who_was_late_once_is_not_late_for_ever() -> None:
    """Its rounds are numbered behind the others', but it has seen the global model that they have."""
    one = server(consistency="backup(1)")
    for site, number, seen in (("a", 1, 0), ("b", 1, 0), ("c", 1, 0), ("a", 2, 1), ("b", 2, 1)):
        one.receive(push(site, number, seen=seen), 0.0)
    assert not one.receive(push("c", 2, seen=2), 0.0).closed
    (closed,) = one.receive(push("a", 3, seen=2), 0.0).closed
    assert closed.senders == ["a", "c"]


def test_nobody_waits_for_a_site_that_waits_itself() -> None:
    """The late one cannot push again before its result comes, and the others have finished."""
    one = server(consistency="backup(1)")
    one.receive(push("a", 1), 0.0)
    assert one.receive(push("b", 1), 0.0).closed
    assert not one.receive(push("c", 1, noise(3), seen=0), 0.0).closed
    assert not one.receive(Leave(site="a"), 0.0).closed
    before = moved(one).clone()
    assert one.receive(Leave(site="b"), 0.0).closed
    torch.testing.assert_close(moved(one) - before, noise(3) / 3, msg="one of three, though the others have gone")


def test_who_has_finished_does_not_wait_for_a_late_one() -> None:
    one = server(sites="ab", consistency="backup(1)")
    one.receive(push("a", 1, noise(1)), 0.0)
    assert one.receive(push("a", 2, final=True), 0.0).closed
    out = one.receive(push("b", 1, noise(2), seen=0), 0.0)
    assert out.closed
    torch.testing.assert_close(moved(one), noise(1) + noise(2) / 2)


def test_backup_waits_for_the_last_site_when_there_are_no_others() -> None:
    one = server(sites="a", consistency="backup(1)")
    assert one.receive(push("a", 1), 0.0).closed


def test_rounds_close_in_order() -> None:
    one = server(sites="ab", consistency="bounded(3)")
    for number in (1, 2, 3):
        one.receive(push("a", number, noise(number), seen=0), 0.0)
    for number in (1, 2, 3):
        (closed,) = one.receive(push("b", number), 0.0).closed
        assert closed.result.version == closed.result.round == number


def test_a_site_that_has_finished_or_left_is_not_waited_for() -> None:
    one = server()
    one.receive(push("a", 1, final=True), 0.0)
    one.receive(push("b", 1), 0.0)
    assert one.receive(push("c", 1), 0.0).closed
    assert not one.receive(push("b", 2), 0.0).closed
    (closed,) = one.receive(Leave(site="c"), 0.0).closed
    assert closed.senders == ["b"]
    assert one.receive(push("b", 3), 0.0).closed


def test_only_a_trigger_that_calls_calls_the_others() -> None:
    one = server("weightgrad-paper")
    out = one.receive(push("a", 1), 0.0)
    assert [(name, m.round) for name, m in out.messages if isinstance(m, RoundRequest)] == [("b", 1), ("c", 1)]
    assert not one.receive(push("b", 1), 0.0).messages
    at_fixed_steps = server("weightgrad")
    assert not at_fixed_steps.receive(push("a", 1, step=2), 0.0).messages


def test_a_site_called_to_two_rounds_results_both() -> None:
    world = Harness("weightgrad", sites=2, trigger="significance(at_most=4)", consistency="bounded(2)")
    fast, slow = world.names
    while len([k for k in world.made if k[0] == fast]) < 2:
        assert world.step(fast)
        world.up(fast)
    while world.down(slow):
        pass
    for _ in range(2):
        world.step(slow)
        world.drain(slow)
        world.drain(fast)
    assert world.server.global_model.version == 2
    assert world.server.next_wake() is None, "no round is left waiting for a site that went past it"


# -- asynchronous ---------------------------------------------------------------------------


def test_async_moves_by_a_share_at_once() -> None:
    one = server(consistency="async_()")
    assert one.receive(push("a", 1, noise(1)), 0.0).closed
    torch.testing.assert_close(moved(one), noise(1) / 3)


def test_the_staleness_aware_rate_is_that_of_its_paper() -> None:
    """Zhang et al.: eta/tau for a push that is tau >= 1 versions old, whatever the number of sites."""
    one = server(consistency="async_(staleness='inverse')")
    one.receive(push("a", 1, noise(1), seen=0), 0.0)  # on the present model
    torch.testing.assert_close(moved(one), noise(1))
    one.receive(push("b", 1, noise(2), seen=0), 0.0)  # one version old
    torch.testing.assert_close(moved(one), noise(1) + noise(2))
    one.receive(push("a", 2, noise(3), seen=2), 0.0)
    one.receive(push("c", 1, noise(4), seen=0), 0.0)  # three versions old
    torch.testing.assert_close(moved(one), noise(1) + noise(2) + noise(3) + noise(4) / 3)


def test_async_can_weigh_the_share_of_a_stale_push_down() -> None:
    one = server(consistency="async_(staleness='inverse_share')")
    one.receive(push("a", 1, noise(1), seen=0), 0.0)
    one.receive(push("a", 2, noise(2), seen=1), 0.0)
    torch.testing.assert_close(moved(one), (noise(1) + noise(2)) / 3)
    one.receive(push("b", 1, noise(3), seen=0), 0.0)  # two versions old
    torch.testing.assert_close(moved(one), (noise(1) + noise(2) + noise(3) / 3) / 3)


@pytest.mark.parametrize("gradients", [True, False])
def test_delay_compensation_is_its_formula(gradients: bool) -> None:
    one = server(sites="ab", gradients=gradients, consistency="async_(compensate=0.5)")
    one.receive(push("a", 1, noise(1), seen=0), 0.0)
    one.receive(push("a", 2, noise(2), seen=1), 0.0)
    before = one.global_model.vector.clone()
    since = before - START
    assert since.abs().max() > 0.1
    one.receive(push("b", 1, noise(3), seen=0), 0.0)
    # the gradient is g + lambda g g (w - w_seen), whether it came as it is or as the update -g
    g = noise(3) if gradients else -noise(3)
    torch.testing.assert_close(one.global_model.vector - before, -(g + 0.5 * g * g * since) / 2, rtol=1e-4, atol=1e-5)


def test_a_push_on_the_present_global_model_is_not_compensated() -> None:
    one = server(sites="ab", consistency="async_(compensate=0.5)")
    one.receive(push("a", 1, noise(1), seen=0), 0.0)
    one.receive(push("b", 1, noise(2), seen=1), 0.0)
    torch.testing.assert_close(moved(one), (noise(1) + noise(2)) / 2)


def test_global_models_kept_for_compensation_do_not_grow_with_rounds() -> None:
    one = server(sites="ab", consistency="async_(compensate=0.5)")
    for number in range(1, 30):
        one.receive(push("a", number, noise(number)), 0.0)
    assert len(one.shards[0]._delay_compensation) <= 5
    assert one.receive(push("b", 1, noise(1), seen=0), 0.0).closed


# -- deadlines ------------------------------------------------------------------------------


def test_t_local_reports_who_holds_the_others_back_and_t_global_loses_it() -> None:
    one = server(t_local=1.0, t_global=5.0)
    assert one.next_wake() is None
    one.receive(push("a", 1, noise(1)), 10.0)
    one.receive(push("b", 1), 10.5)
    assert one.next_wake() == 11.0
    out = one.wake(11.0)
    assert out.held_back == ["c"]
    assert not out.closed
    assert one.next_wake() == 15.0
    assert not one.wake(12.0).held_back, "said once"
    out = one.wake(15.0)
    assert out.lost == ["c"]
    assert out.closed[0].senders == ["a", "b"]
    assert [name for name, _ in out.messages] == ["a", "b"], "the lost one hears nothing"
    assert one.next_wake() is None
    torch.testing.assert_close(moved(one), noise(1) / 2)


def test_each_of_several_rounds_closed_at_once_has_its_own_digest() -> None:
    one = server(sites="ab", consistency="bounded(2)", t_global=5.0)
    one.receive(push("a", 1, noise(1)), 0.0)
    one.receive(push("a", 2, noise(2), seen=0), 1.0)
    out = one.wake(5.0)
    assert [c.result.version for c in out.closed] == [1, 2]
    assert out.closed[0].digest != out.closed[1].digest == one.global_model.digest()


def test_the_timeout_grows_with_the_rounds_unless_it_is_fixed() -> None:
    adapting, constant = server(sites="ab", t_global="auto"), server(sites="ab", t_global=60.0)
    for one in (adapting, constant):
        assert one.coordinator.timeout() == 60.0
        for number in (1, 2, 3):
            one.receive(push("a", number, noise(number)), 100.0 * number)
            one.receive(push("b", number), 100.0 * number + 20.0)
    assert adapting.coordinator.timeout() == 200.0
    assert constant.coordinator.timeout() == 60.0
    adapting.receive(push("a", 4), 400.0)
    assert adapting.next_wake() == 600.0
    assert server(t_global=None).coordinator.timeout() is None


def test_a_lost_site_that_pushes_is_in_again_and_told_what_it_missed() -> None:
    one = server(t_global=5.0, up="topk(0.05)", down="topk(0.02)")
    one.receive(push("a", 1, noise(1)), 0.0)
    one.receive(push("b", 1), 0.0)
    one.wake(5.0)
    out = one.receive(push("c", 1, noise(3), seen=0), 6.0)
    (reply,) = to(out, "c", JoinReply)
    assert (reply.version, reply.round, reply.included) == (1, 2, 0)
    assert [a.version for a in reply.results] == [1]
    assert not reply.downloads
    one.receive(push("a", 2), 6.0)
    (closed,) = one.receive(push("b", 2), 6.0).closed
    assert closed.result.included == {"a": 2, "b": 2, "c": 1}


def test_a_site_that_missed_more_than_the_global_model_weighs_downloads_it() -> None:
    one = server(sites="ab", t_global=1.0)
    one.members.lose("b")
    for number in range(1, 5):
        one.receive(push("a", number, noise(number)), 0.0)
    (reply,) = to(one.receive(Join(site="b", version=0), 0.0), "b", JoinReply)
    assert reply.results == ()
    assert torch.equal(weights_of(reply), one.global_model.vector)
    (newcomer,) = to(one.receive(Join(site="d", version=-1), 0.0), "d", JoinReply)
    assert newcomer.downloads
    assert torch.equal(weights_of(newcomer), one.global_model.vector)
    (present,) = to(one.receive(Join(site="b", version=4), 0.0), "b", JoinReply)
    assert not present.downloads
    assert present.results == ()


def test_the_log_of_results_does_not_grow_with_rounds() -> None:
    one = server(sites="a", down="topk(0.05)")
    for number in range(1, 60):
        one.receive(push("a", number, noise(number)), 0.0)
    kept = [version for version in range(60) if one.shards[0].log.since(version, one.global_model.version) is not None]
    assert 50 < min(kept) < 59, "the last few only"


# -- the end --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("weightgrad", {}),
        ("streaming", {}),
        ("onebit", {"up": "warmup(2, onebit())", "down": "warmup(2, onebit())"}),
        ("adaptive", {"down": "adaptive(pi=32)", "down_selector": "all"}),
    ],
)
def test_the_last_round_flushes_what_the_down_codec_kept_back(name: str, changes: dict[str, Any]) -> None:
    world = Harness(name, flush="fp32", **changes)
    for _ in range(20):
        for n in world.names:
            world.step(n)
            world.drain(n)
    assert world.server.shards[0].residual.whole().abs().max() > 1e-3
    world.finish()
    world.check()
    assert world.server.shards[0].residual.whole().abs().max() == 0


def test_the_last_round_moves_what_nobody_pushed_by_what_was_kept_back_and_nothing_else() -> None:
    """An outer optimizer takes no step where there is no push, in the last round as in all others."""
    one = server(sites="a", aggregator="outer('nesterov')", down="ef(topk(0.1))", flush="fp32")
    for number in (1, 2, 3):
        one.receive(push("a", number, noise(number)), 0.0)
    kept_back, before = one.shards[0].residual.whole().clone(), moved(one)
    velocity = one.shards[0]._memory.vectors["velocity"].clone()
    last = push("a", 4, final=True)
    segment = Segment(20, Fp32().encode(noise(4)[:10], {}, 0)[0])
    assert one.receive(replace(last, segments=(segment,)), 0.0).closed
    rest = torch.ones(N, dtype=torch.bool)
    rest[20:30] = False
    torch.testing.assert_close((moved(one) - before)[rest], kept_back[rest])
    assert torch.equal(one.shards[0]._memory.vectors["velocity"][rest], velocity[rest])
    assert not one.shards[0].residual.whole().any()


def test_without_a_flush_it_stays() -> None:
    world = Harness("weightgrad", flush="none")
    for _ in range(20):
        for n in world.names:
            world.step(n)
        for n in world.names * 2:
            world.drain(n)
    before = world.server.shards[0].residual.whole().clone()
    world.finish()
    assert torch.equal(world.server.shards[0].residual.whole(), before)


# -- durability -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"aggregator": "outer('nesterov')", "down": "ef(topk(0.1) > sign())"},
        {"aggregator": "outer('adam', lr=0.1)", "down": "topk(0.1, exact=False)"},
        {"down": "powersgd(rank=2)", "per": "tensor"},
    ],
)
def test_a_restored_server_goes_on_bit_for_bit(changes: dict[str, Any]) -> None:
    first = server(sites="ab", **changes)

    def rounds(one: ServerState, numbers: range) -> None:
        for number in numbers:
            one.receive(push("a", number, noise(1, number)), 0.0)
            one.receive(push("b", number, noise(2, number), samples=8), 0.0)

    rounds(first, range(1, 5))
    state = first.checkpoint()
    first.receive(push("a", 5, noise(1, 5)), 0.0)  # in an open round: sent again by its site
    again = server(sites="", **changes)
    out = again.restore(state)
    assert [(name, type(m)) for name, m in out.messages] == [("a", ServerRestarted), ("b", ServerRestarted)]
    assert again.next_wake() is None
    rounds(first, range(5, 9))
    rounds(again, range(5, 9))
    assert again.global_model.version == first.global_model.version == 8
    assert again.global_model.digest() == first.global_model.digest()
    assert torch.equal(again.shards[0].residual.whole(), first.shards[0].residual.whole())


def test_a_restored_server_knows_what_it_had_included() -> None:
    first = server(sites="ab")
    first.receive(push("a", 1, noise(1)), 0.0)
    first.receive(push("b", 1, noise(2)), 0.0)
    again = server(sites="")
    again.restore(first.checkpoint())
    (reply,) = to(again.receive(Join(site="a", version=1), 0.0), "a", JoinReply)
    assert (reply.included, reply.round) == (1, 2)
    assert not again.receive(push("a", 1, noise(1)), 0.0).closed
    assert again.global_model.digest() == first.global_model.digest()


@pytest.mark.parametrize("same_process", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_a_restored_server_sends_the_results_that_its_log_has_kept(kept: bool, same_process: bool) -> None:
    plan = find("diloco", {"aggregator": "mean", "down": "topk(0.05)"}).for_server()
    log = MemoryResultLog(10**6, kept=kept)

    def made() -> ServerState:
        return ServerState(
            GlobalModel(LAYOUT, START, optimizer=None, rate=lambda step: 1.0), plan, 1, make_log=lambda _: log
        )

    first = made()
    first.receive(Join(site="a", version=0), 0.0)
    for number in range(1, 7):
        first.receive(push("a", number, noise(number)), 0.0)
        if number == 4:
            state = first.checkpoint()
    again = first if same_process else made()
    again.restore(state)
    (reply,) = to(again.receive(Join(site="a", version=2), 0.0), "a", JoinReply)
    assert (reply.version, reply.downloads) == (4, not kept)
    assert [result.version for result in reply.results] == ([3, 4] if kept else [])
    if kept:
        found = torch.zeros(N)
        for result in first.shards[0].log.since(0, 4) or ():
            for segment in result.segments:
                segment.into(found, fixed.ADD)
        torch.testing.assert_close(found, moved(again))
    (present,) = to(again.receive(Join(site="a", version=4), 0.0), "a", JoinReply)
    assert not present.downloads
    assert present.results == ()
    (closed,) = again.receive(push("a", 5, noise(5)), 0.0).closed
    (later,) = to(again.receive(Join(site="a", version=4), 0.0), "a", JoinReply)
    assert [result.version for result in later.results] == [5] == [closed.result.version]


@pytest.mark.parametrize("same_process", [True, False])
def test_results_of_a_restored_server_have_their_schedules(same_process: bool) -> None:
    plan, codec = find("auto").for_server(), codecs.parse("topk(0.5) > sign()")
    log = MemoryResultLog(10**6, kept=True)

    def made() -> ServerState:
        return ServerState(
            GlobalModel(LAYOUT, START, optimizer=None, rate=lambda step: 1.0), plan, 1, make_log=lambda _: log
        )

    first = made()
    first.receive(Join(site="a", version=0), 0.0)
    schedules = []
    for number in range(1, 6):
        segment = Segment(0, codec.encode(noise(number), {}, 0)[0])
        came = replace(push("a", number), segments=(segment,), report=Report(0.03, max(0, number - 1), 0.05))
        (closed,) = first.receive(came, 0.1 * number).closed
        schedules.append(closed.result.schedule)
    assert any(schedules)
    again = first if same_process else made()
    again.restore(first.checkpoint())
    (reply,) = to(again.receive(Join(site="a", version=0), 0.0), "a", JoinReply)
    assert [result.schedule for result in reply.results] == schedules


def test_a_site_whose_last_push_a_checkpoint_lacks_is_still_waited_for() -> None:
    first = server(sites="ab")
    first.receive(push("a", 1, noise(1)), 0.0)
    first.receive(push("a", 2, noise(2), final=True), 0.0)  # of a round that is not the next to close
    assert first.receive(push("b", 1), 0.0).closed
    again = server(sites="")
    again.restore(first.checkpoint())
    assert not again.receive(push("b", 2, final=True), 0.0).closed
    (closed,) = again.receive(push("a", 2, noise(2), final=True), 0.0).closed
    assert closed.senders == ["a", "b"]


def test_lost_sites_are_told_of_a_restart_and_those_that_left_are_not() -> None:
    first = server()
    first.members.lose("b")
    first.members.leave("c")
    out = server(sites="").restore(first.checkpoint())
    assert [name for name, _ in out.messages] == ["a", "b"]


def test_a_site_that_joined_after_the_checkpoint_is_asked_to_join_again() -> None:
    one = server(sites="ab")
    out = one.receive(push("d", 1, noise(1)), 0.0)
    assert [(name, type(m)) for name, m in out.messages] == [("d", ServerRestarted)]
    one.receive(push("a", 1), 0.0)
    (closed,) = one.receive(push("b", 1), 0.0).closed
    assert closed.senders == ["a", "b"]


# -- what no honest peer sends --------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        RoundRequest(round=1),
        ServerRestarted(),
        RoundResult(version=1, round=1, step=1, segments=()),
        JoinReply(version=1, round=1, step=1, included=0),
    ],
)
def test_what_only_sites_receive_is_refused(message: Message) -> None:
    with pytest.raises(ProtocolError, match=type(message).__name__):
        server().receive(message, 0.0)


@pytest.mark.parametrize("message", [push("a", 1), Join(site="a", version=0), Leave(site="a")])
def test_what_only_the_server_receives_is_refused(message: Message) -> None:
    with pytest.raises(ProtocolError, match=type(message).__name__):
        Harness("baseline").ends["site-0"].receive(message, 0.0)


def test_a_site_ahead_of_the_server_is_refused() -> None:
    with pytest.raises(ProtocolError, match="older checkpoint"):
        server().receive(Join(site="a", version=3), 0.0)


def test_an_result_out_of_turn_is_refused() -> None:
    with pytest.raises(ProtocolError, match="version 0"):
        server().global_model.apply(RoundResult(version=2, round=2, step=2, segments=()))


def test_a_site_that_left_and_pushes_again_is_awaited_again() -> None:
    one = server(sites="ab")
    one.receive(Leave(site="a"), 0.0)
    assert one.receive(push("b", 1), 1.0).closed, "nobody waits for a site that has left"
    one.receive(Join(site="a", version=1), 2.0)
    one.receive(push("a", 2, after=0, seen=1), 3.0)
    (closed,) = one.receive(push("b", 2, seen=1), 4.0).closed
    assert closed.senders == ["a", "b"]
    assert not one.receive(push("b", 3, seen=2), 5.0).closed, "the round waits for a"
    assert one.receive(push("a", 3, seen=2), 6.0).closed


def test_a_site_that_left_and_joins_again_is_awaited_from_then_on() -> None:
    one = server(sites="ab")
    one.receive(Leave(site="a"), 0.0)
    assert one.receive(push("b", 1), 1.0).closed
    one.receive(Join(site="a", version=1), 2.0)
    assert not one.receive(push("b", 2, seen=1), 3.0).closed, "a is in the run, though it has not pushed yet"
    (closed,) = one.receive(push("a", 2, after=0, seen=1), 4.0).closed
    assert closed.senders == ["a", "b"]


def test_a_site_that_has_finished_and_loses_its_connection_is_not_awaited() -> None:
    one = server(sites="ab")
    one.receive(push("a", 1, final=True), 0.0)
    one.receive(push("b", 1), 0.0)
    one.receive(Join(site="a", version=0), 1.0)
    assert one.receive(push("b", 2, seen=1), 2.0).closed


def test_the_leave_of_a_stranger_is_nothing() -> None:
    assert not server().receive(Leave(site="nobody"), 0.0).messages


def test_a_site_that_has_loaded_is_not_sent_another_download_for_what_it_was_sent_meanwhile() -> None:
    """Results may be larger than what the log keeps; a site would load for ever."""
    model = GlobalModel(LAYOUT, START, optimizer=None, rate=lambda step: 1.0)
    one = ServerState(model, find("diloco").for_server(), 1, make_log=lambda _: MemoryResultLog(0))
    one.receive(Join(site="a", version=0), 0.0)
    (reply,) = to(one.receive(Join(site="b", version=-1, epoch=7), 0.0), "b", JoinReply)
    assert reply.downloads
    assert to(one.receive(push("a", 1, torch.ones(N)), 1.0), "b"), (
        "a round does not wait for it, and its result is sent"
    )
    for epoch, version, downloads in ((8, 0, True), (7, 1, False)):
        (reply,) = to(one.receive(Join(site="b", version=-1, epoch=7), 2.0), "b", JoinReply)
        loaded = reply.version
        one.receive(push("a", loaded + 1, torch.ones(N)), 2.0)
        (reply,) = to(one.receive(Join(site="b", version=loaded, epoch=epoch), 3.0), "b", JoinReply)
        assert (reply.version, reply.downloads, reply.results) == (loaded + 1, downloads, ())
        assert loaded == version + 1
    one.receive(push("a", 4, torch.ones(N)), 4.0)
    assert "b" in one.waits_for(), "now rounds wait for it"

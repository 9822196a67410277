"""A late site whose first model is approximate trains at once, loses nothing, and ends with everybody's bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightgrad import codecs
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.server.state import ServerState
from weightgrad.core.site.shard_orders import LoadOrder
from weightgrad.core.site.state import SiteState
from weightgrad.core.strategies import PRESETS, find
from weightgrad.errors import ProtocolError, SpecError
from weightgrad.kernels import fixed
from weightgrad.wire.message_sizes import nbytes
from weightgrad.wire.messages import Join, JoinReply, ModelPart, Push, RoundResult, Segment, check_download_codec

from .harness import LAYOUT, Harness, noise

CODEC = "qsgd(bits=8)"
CHANGES: dict[str, dict[str, Any]] = {
    "dgc": {"up": "dgc(0.05, momentum=0.0, warmup=5)"},
    "diloco": {"every": 3},
    "streaming": {"trigger": "staggered(4, 4)"},
    "sparseloco": {"every": 4, "up": "ef(topk(0.1) > codebook(bits=2))"},
}


def begun(name: str, rounds: int = 3, **changes: Any) -> Harness:
    """Two sites that have done a few rounds."""
    world = Harness(name, sites=2, **{**CHANGES.get(name, {}), **changes})
    while world.server.global_model.version < rounds:
        for site in world.names:
            world.step(site)
            world.drain(site)
    return world


def approximate(name: str = "diloco", **changes: Any) -> tuple[Harness, SiteState]:
    """The same, and a third that has its first model; its request for the exact one is on its way."""
    world = begun(name, **changes)
    end = world.come("late", CODEC)
    assert world.up("late")
    assert world.down("late")
    assert not end.exact
    return world, end


def whole_model(world: Harness) -> tuple[ModelPart, ...]:
    """The server's model, exact."""
    return tuple(world.server.shards[0].model_parts(world.server.shards[0].served))


def end_of(world: Harness) -> None:
    world.finish()
    world.check()
    assert all(end.exact for end in world.ends.values())


# -- the way of it --------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_it_trains_before_the_exact_global_model_is_there(name: str) -> None:
    world = begun(name)
    end = world.come("late", CODEC)
    world.up("late")
    (sent,) = world.to_site["late"]
    assert isinstance(sent, JoinReply)
    assert sent.approximate
    exact = replace(sent, approximate=False, parts=whole_model(world))
    assert nbytes(sent) < 0.62 * nbytes(exact), "of 64 weights a good part is headers"
    world.down("late")
    assert torch.allclose(end.global_model(), world.server.global_model.vector, atol=0.05)
    assert end.digest() != world.server.global_model.digest()
    assert end.step == world.server.global_model.step
    assert world.step("late"), "it does not wait"
    world.up("late")
    (result,) = (m for m in world.to_site["late"] if isinstance(m, JoinReply))
    assert result.downloads
    assert not result.approximate
    while not end.exact:
        assert world.down("late")
    assert end.version == world.server.global_model.version
    assert end.digest() == world.server.global_model.digest()
    assert end.full_downloads == 2
    end_of(world)


def test_nothing_that_it_has_done_is_lost_and_nothing_is_sent_twice() -> None:
    world, end = approximate(overlap=8)
    for _ in range(5):
        assert world.step("late")
    pushes = [m for m in world.to_server["late"] if isinstance(m, Push)]
    assert len(pushes) == 1, "one round, on the approximate global model"
    world.up("late")  # the request is the first in the queue, and the push is behind it
    assert world.down("late")
    assert end.exact
    assert end.in_flight == 1
    torch.testing.assert_close((end.model - end.global_model()).double(), world.updates["late"], rtol=1e-4, atol=1e-5)
    assert [m for m in world.to_server["late"] if isinstance(m, Push)] == pushes
    end_of(world)


def test_a_push_in_an_open_round_counts_once() -> None:
    """The request overtaken by nothing, but made by a site whose push waits at the server for the others."""
    world, end = approximate()
    request = world.to_server["late"].popleft()
    while not end.in_flight:
        world.step("late")
    while world.up("late"):
        pass
    assert world.server.members.by_name["late"].pushed_round > world.server.members.by_name["late"].included_round
    world.to_server["late"].append(request)
    world.up("late")
    world.down("late")
    assert end.exact
    assert end.in_flight == 1
    end_of(world)


def test_a_site_whose_missed_results_are_there_needs_no_first_global_model() -> None:
    world = Harness("diloco", sites=2)
    world.server.receive(Join(site="site-2", version=0, download_codec=CODEC), 0.0)
    out = world.server.receive(Join(site="site-2", version=0, download_codec=CODEC), 0.0)
    ((_, reply),) = out.messages
    assert isinstance(reply, JoinReply)
    assert not reply.downloads
    assert not reply.approximate


def test_only_the_first_global_model_is_asked_for_in_a_codec() -> None:
    world = begun("diloco")
    end = world.come("late", CODEC)
    assert [(m.version, m.download_codec) for m in world.to_server["late"] if isinstance(m, Join)] == [(-1, CODEC)]
    world.drain("late")
    (again,) = end.join()
    assert isinstance(again, Join)
    assert (again.version, again.download_codec) == (world.server.global_model.version, None)


# -- what may happen in between -------------------------------------------------------------


@pytest.mark.parametrize("name", ["baseline", "diloco", "weightgrad"])
def test_the_server_is_started_again(name: str) -> None:
    world, end = approximate(name)
    world.step("late")
    world.crash_server()
    assert world.down("late")
    assert [(m.version, m.download_codec) for m in world.to_server["late"] if isinstance(m, Join)] == [(-1, None)]
    assert not world.step("late"), "now it waits for the exact one"
    world.drain("late")
    assert end.exact
    end_of(world)


@pytest.mark.parametrize("name", ["baseline", "diloco", "weightgrad"])
def test_it_finishes(name: str) -> None:
    world, end = approximate(name)
    world.step("late")
    (request,) = (m for m in world.to_server["late"] if isinstance(m, Join))
    world.to_server["late"].remove(request)
    world._send("late", end.finish(world.now))
    world.finish()
    assert end.in_flight == 0
    assert not end.finished
    assert end.blocked(world.now) == "exact global model"
    world.to_server["late"].append(request)
    end_of(world)


@pytest.mark.parametrize("name", ["baseline", "diloco", "weightgrad"])
def test_it_is_killed_and_comes_back_with_its_state(name: str) -> None:
    world, end = approximate(name)
    world.step("late")
    state = end.state()
    world.to_server["late"].clear()
    again = SiteState("late", world._global_model(), world.strategy.for_site(), samples=8, key=5, download_codec=CODEC)
    again.load(state)
    assert "approximate" in again.state()
    assert all(torch.equal(tensor, state[key]) for key, tensor in again.state().items())
    world.ends["late"] = again
    world._send("late", again.join())
    world.drain("late")
    assert again.exact
    assert "approximate" not in again.state()
    end_of(world)


def test_pushes_of_a_former_life_cost_no_work_twice() -> None:
    """The server has pushes of it that it knows nothing of; what it does from now on is its own all the same."""
    world = begun("diloco")
    world.server.members.by_name["late"] = world.server.members.join("late")
    world.server.members.by_name["late"].pushed_round = world.server.members.by_name["late"].included_round = 2
    end = world.come("late", CODEC)
    world.up("late")
    world.down("late")
    assert world.step("late")
    world.drain("late")
    assert end.exact
    torch.testing.assert_close((end.model - end.global_model()).double(), world.updates["late"], rtol=1e-4, atol=1e-5)
    end_of(world)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("baseline", {}),
        ("diloco", {"every": 1, "aggregator": "mean"}),
        ("diloco", {"every": 1, "aggregator": "mean", "overlap": 2}),
        ("diloco", {"every": 1, "aggregator": "mean", "consistency": "bounded(2)"}),
        ("auto", {"flush": "fp32"}),
    ],
    ids=str,
)
def test_pushes_of_a_former_life_in_open_rounds_cost_none_of_the_present_one(
    name: str, changes: dict[str, Any], steps: int
) -> None:
    """The server has a push for these rounds, so it would drop another: the site goes on in a later round."""
    world = Harness(name, sites=2, **changes)
    site, _ = world.names
    for _ in range(steps):
        world.step(site)
        while world.up(site):
            pass
    world.updates[site].zero_()
    for push in world.made.values():
        pushed = torch.zeros(LAYOUT.numel)
        for segment in push.segments:
            segment.into(pushed, fixed.ADD)
        world.updates[site] += pushed.double()
    world.to_site[site].clear()
    world.ends[site] = end = world.site(site, 5, noise(98))
    world._send(site, end.join(same_start=False))
    world.drain(site)
    again = world.site(site, 5, noise(98))  # and its state says so
    again.load(end.state())
    world.ends[site] = again
    world._send(site, again.join())
    world.drain(site)
    for _ in range(6):
        for one in world.names:
            world.step(one)
            world.drain(one)
    for one in world.names:
        world.drain(one)
    end_of(world)


EVENTS = ["step", "step", "step", "up", "up", "down", "down", "crash_site", "crash_server", "time_out"]
schedules = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 2)), max_size=50)


def play(world: Harness, schedule: list[tuple[str, int]]) -> None:
    world.come("late", CODEC)
    for what, who in schedule:
        if what in ("crash_server", "time_out"):
            getattr(world, what)()
        else:
            getattr(world, what)(world.names[who])
    end_of(world)


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=schedules)
def test_whatever_happens(name: str, schedule: list[tuple[str, int]]) -> None:
    play(begun(name), schedule)


@pytest.mark.parametrize("consistency", ["bounded(2)", "backup(1)", "async_()"])
@pytest.mark.parametrize("name", ["baseline", "diloco"])
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=schedules)
def test_whatever_happens_with_any_consistency(name: str, consistency: str, schedule: list[tuple[str, int]]) -> None:
    play(begun(name, consistency=consistency), schedule)


# -- what is encoded, and what is refused ---------------------------------------------------


def test_what_must_not_become_zero_stays_exact() -> None:
    """Optimizers divide by second moments, which have no negative entries."""
    strategy = find("baseline")
    model = GlobalModel(LAYOUT, noise(99), optimizer=("adam", {"lr": 0.1}), rate=lambda step: 0.1)
    server = ServerState(model, strategy.for_server(), 1)
    server.receive(Join(site="a", version=0), 0.0)
    segment = Segment(0, codecs.parse("fp32").encode(noise(1), {}, 0)[0])
    server.receive(Push(site="a", round=1, after=0, step=1, seen=0, samples=4, segments=(segment,)), 0.0)
    ((_, reply),) = server.receive(Join(site="late", version=-1, download_codec=CODEC), 0.0).messages
    assert isinstance(reply, JoinReply)
    found = {part.vector: [one.payload.codec for one in part.segments] for part in reply.parts}
    assert found == {"exp_avg": ["uniform"], "exp_avg_sq": ["fp32"], "weights": ["uniform"]}
    assert reply.scalars.keys() == {f"{index}.step" for index in range(len(LAYOUT.slots))}
    own = GlobalModel(LAYOUT, noise(98), optimizer=("adam", {}), rate=lambda step: 0.1)
    site = SiteState("late", own, strategy.for_site(), samples=4, key=1)
    site.join(same_start=False)
    site.receive(reply, 0.0)
    got, want = own.vectors(), model.vectors()
    assert got.keys() == want.keys()
    assert torch.equal(got["exp_avg_sq"], want["exp_avg_sq"])
    for name in ("exp_avg", "weights"):
        assert not torch.equal(got[name], want[name])
        assert torch.allclose(got[name], want[name], atol=0.05)


def test_what_a_codec_cannot_encode_is_sent_exact() -> None:
    weights = noise(1)
    weights[3] = 1e6
    model = GlobalModel(LAYOUT, weights, optimizer=None, rate=lambda step: 0.1)
    server = ServerState(model, find("diloco").for_server(), 1)
    ((_, reply),) = server.receive(Join(site="late", version=-1, download_codec="fp16"), 0.0).messages
    assert isinstance(reply, JoinReply)
    assert [one.payload.codec for part in reply.parts for one in part.segments] == ["fp32"]


def test_a_codec_that_saves_nothing_sends_the_exact_global_model() -> None:
    world = begun("diloco")
    end = world.come("late", "fp32")
    world.drain("late")
    assert end.exact
    assert end.full_downloads == 1, "and it is sent once"


@pytest.mark.parametrize("spec", ["ef(qsgd(bits=4))", "onebit", "dgc(0.1)", "powersgd(2)", "clip(2.0) > adaptive"])
def test_a_codec_with_a_memory_is_refused(spec: str) -> None:
    with pytest.raises(SpecError, match=r"keeps a memory.*such as qsgd"):
        check_download_codec(spec)
    with pytest.raises(ProtocolError, match=r"'late' asks for a download that cannot be made: .*memory"):
        Join(site="late", version=-1, download_codec=spec)


@pytest.mark.parametrize("spec", ["", "qsgd(bits=9)", "zip", "qsgd(", "qsgd(bits=8)é", "qsgd(bits=8)" + " " * 250])
def test_a_codec_that_cannot_be_read_is_refused(spec: str) -> None:
    with pytest.raises(SpecError):
        check_download_codec(spec)
    with pytest.raises(ProtocolError, match="cannot be made"):
        Join(site="late", version=-1, download_codec=spec)


@pytest.mark.parametrize("name", ["baseline", "diloco"])
@pytest.mark.parametrize("numel", [LAYOUT.numel - 1, 0])
def test_a_global_model_that_is_not_complete_is_refused(name: str, numel: int) -> None:
    world = begun(name)
    end = world.come("late", None)
    payload, _ = codecs.parse("fp32").encode(torch.zeros(numel), {}, 0)
    part = ModelPart(version=3, vector="weights", segments=(Segment(0, payload),), last=True)
    with pytest.raises(ProtocolError, match=f"a download with {numel} of the {LAYOUT.numel} weights"):
        end.receive(JoinReply(version=3, round=4, step=9, included=0, downloads=True, parts=(part,)), world.now)


@pytest.mark.parametrize("name", ["diloco", "streaming", "weightgrad"])
def test_a_download_that_is_interrupted_begins_anew(name: str) -> None:
    world = begun(name)
    end = world.come("late", None)
    for _ in range(2):
        world.to_server["late"].clear()
        world._send("late", end.join(same_start=False))
    world.drain("late")
    assert world.step("late")
    model, fresh = end.model.clone(), end.fresh_update()
    assert fresh.any()
    (shard,) = end.shards
    for discards in (False, False):
        shard.begin_load(discards=discards)
        shard.load("weights", Segment(0, codecs.parse("fp32").encode(noise(5)[:9], {}, 0)[0]))
    for part in whole_model(world):
        for segment in part.segments:
            shard.load(part.vector, segment)
    shard.end_load(LoadOrder(version=end.version, step=end.step, included=0, discards=False), {})
    torch.testing.assert_close(end.fresh_update(), fresh)
    if name != "streaming":  # which had kept a part of the model it came with
        torch.testing.assert_close(end.model, model)


def test_a_global_model_older_than_its_own_is_refused() -> None:
    world, end = approximate()
    while not end.version > 3:
        for site in world.names:
            world.step(site)
            world.up(site)
            world.down(site)
            end.coordinator.joining.exact = False
    with pytest.raises(ProtocolError, match="the server only 3: the server was restored from an older checkpoint"):
        end.receive(
            JoinReply(version=3, round=4, step=9, included=0, downloads=True, parts=whole_model(world)), world.now
        )


def test_results_move_an_approximate_global_model_too() -> None:
    world, end = approximate()
    before = end.global_model().clone()
    segment = Segment(0, codecs.parse("fp32").encode(noise(5), {}, 0)[0])
    end.receive(RoundResult(version=4, round=4, step=12, segments=(segment,)), world.now)
    end.apply_results()
    assert end.version == 4
    assert torch.equal(end.global_model(), before + noise(5))
    assert not end.exact

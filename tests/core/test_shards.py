"""Sites of several ranks and servers of several processes: the same bits as one, where the cut must not matter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightgrad.codecs.registry import decode_into
from weightgrad.core import pieces
from weightgrad.core.layout import Layout
from weightgrad.core.site.shard_orders import LoadOrder
from weightgrad.core.site.state import SiteState
from weightgrad.core.site.update_shard import UpdateShard
from weightgrad.core.strategies import PRESETS, find
from weightgrad.wire import messages
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_parts import result_parts
from weightgrad.wire.messages import JoinReply, Push, RoundResult, Segment

from .harness import LAYOUT, Harness, at, noise

N = LAYOUT.numel
WHOLE = Intervals.whole(N)
Holdings = Mapping[str, Sequence[Intervals]]


def rows(layout: Layout, ranks: int) -> list[Intervals]:
    """Each tensor cut into rows, as FSDP does: the last ranks may get less, or nothing."""
    found = []
    for rank in range(ranks):
        spans = []
        for slot in layout.slots:
            width, each = slot.numel // slot.shape[0], -(-slot.shape[0] // ranks)
            first, last = min(slot.shape[0], rank * each), min(slot.shape[0], (rank + 1) * each)
            spans.append((slot.start + first * width, slot.start + last * width))
        found.append(Intervals.of(spans))
    return found


def tensors(*groups: tuple[int, ...]) -> list[Intervals]:
    """Ranks that hold whole tensors."""
    return [Intervals.of((LAYOUT.slots[i].start, LAYOUT.slots[i].stop) for i in group) for group in groups]


def cut_at(*bounds: int) -> list[Intervals]:
    edges = (0, *bounds, N)
    return [Intervals.of([(first, last)]) for first, last in pairwise(edges)]


SHARDED: Holdings = {
    "site-0": rows(LAYOUT, 2),
    "site-1": rows(LAYOUT, 5),  # of the tensors with four rows the last rank has nothing
    "site-2": [Intervals(((0, 3), (17, 31), (63, 64))), Intervals(()), Intervals(((3, 17), (31, 63)))],
}
WHOLE_TENSORS: Holdings = {
    "site-0": tensors((0,), (1, 2, 3)),
    "site-1": tensors((3,), (), (0, 2), (1,)),
    "site-2": [WHOLE],
}


@contextmanager
def pieces_of(limit: int) -> Iterator[None]:
    """Pieces of so many elements: the model of the tests is tiny."""
    with mock.patch.object(pieces, "PIECE", limit):
        yield


@dataclass(frozen=True)
class Moment:
    """Everything that a site and its server are at some moment."""

    global_model: str
    server: str
    version: int
    model: Tensor
    residual: Tensor
    fresh: Tensor


def run(name: str, steps: int = 24, limit: int = pieces.PIECE, **settings_: Any) -> list[Moment]:
    """A run in which everything arrives at once; what every site was after every step."""
    with pieces_of(limit):
        world = Harness(name, **settings_)
        found = []

        def look() -> None:
            for end in world.ends.values():
                found.append(
                    Moment(
                        end.digest(),
                        world.server.global_model.digest(),
                        end.version,
                        end.model.clone(),
                        end.residual(),
                        end.fresh_update(),
                    )
                )

        for _ in range(steps):
            for site in world.names:
                world.step(site)
                world.drain(site)
            for site in world.names:
                world.drain(site)
            look()
        world.finish()
        world.check()
        look()
    assert found[-1].version > 3
    return found


def assert_same(one: list[Moment], other: list[Moment]) -> None:
    for a, b in zip(one, other, strict=True):
        assert (a.version, a.global_model, a.server) == (b.version, b.global_model, b.server)
        assert torch.equal(a.model, b.model)
        assert torch.equal(a.residual, b.residual)
        assert torch.equal(a.fresh, b.fresh)


# -- ranks of a site ---------------------------------------------------------------------------

# Codecs and selectors that look at one element at a time.
ELEMENTWISE: dict[str, tuple[str, dict[str, Any]]] = {
    "baseline": ("baseline", {}),
    "adam": ("baseline", {"optimizer": ("adam", {"lr": 0.1})}),
    "momentum of gradients that come in turn": (
        "baseline",
        {
            "optimizer": ("sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
            "selector": "fragment(4)",
            "trigger": "staggered(4, 4)",
            "up": "bf16",
            "down": "bf16",
        },
    ),
    "baseline in bf16": ("baseline", {"up": "bf16", "down": "bf16"}),
    "baseline by tensor": ("baseline", {"up": "bf16", "down": "bf16", "per": "tensor"}),
    # With fp32, a piece of which most entries are chosen is sent whole: that does depend on the piece.
    "gaia": ("gaia", {"up": "bf16"}),
    "gaia in order": ("gaia", {"up": "bf16", "consistency": "sync"}),
    "elements": (
        "weightgrad",
        {
            "selector": "significant('element')",
            "trigger": "significance(1.5, at_most=4, every=2)",
            "up": "bf16",
            "down": "fp32",
        },
    ),
    "significant": (
        "weightgrad",
        {"trigger": "significance(1.5, at_most=4)", "up": "bf16", "down": "bf16", "overlap": 1},
    ),
    "diloco": ("diloco", {"every": 3}),
    "adam outside": ("diloco", {"every": 2, "aggregator": "outer('adam', lr=0.1)"}),
    "median": ("diloco", {"every": 2, "aggregator": "median", "up": "fp16", "down": "bf16"}),
    "senders": ("sparseloco", {"every": 2, "up": "ef(threshold(0.1))"}),
    "relayed": ("diloco", {"every": 2, "aggregator": "mean", "up": "bf16", "down": "bf16", "relay": 3}),
    "overlapped": ("diloco", {"every": 2, "aggregator": "mean", "up": "bf16", "down": "bf16", "overlap": 3}),
    "a share of the residual": (
        "diloco",
        {"every": 2, "up": "bf16", "down": "bf16", "overlap": 1, "resume": "global_model_and_residual(0.25)"},
    ),
    "fragments": ("streaming", {"trigger": "staggered(4, 4)", "up": "bf16", "down": "bf16"}),
    "fragments without mixing": (
        "streaming",
        {"trigger": "staggered(4, 4)", "up": "bf16", "down": "bf16", "resume": "global_model"},
    ),
    "fragments that are waited for": (
        "streaming",
        {"trigger": "staggered(4, 4)", "up": "bf16", "down": "bf16", "resume": "global_model", "overlap": 0},
    ),
    "bounded": ("diloco", {"every": 2, "up": "bf16", "down": "bf16", "consistency": "bounded(2)"}),
    "asynchronous": (
        "diloco",
        {"every": 2, "up": "bf16", "down": "bf16", "consistency": "async_('inverse', compensate=0.1)"},
    ),
}


@pytest.mark.parametrize("row", ELEMENTWISE)
@pytest.mark.parametrize("limit", [pieces.PIECE, 7])
def test_ranks_of_a_site_end_with_the_bits_of_one(row: str, limit: int) -> None:
    name, changes = ELEMENTWISE[row]
    assert_same(run(name, limit=limit, holdings=holdings_for(row), **changes), run(name, **changes))


def holdings_for(row: str) -> Holdings:
    """Pushes are relayed where sites are sharded alike."""
    return SHARDED if row != "relayed" else dict.fromkeys(SHARDED, rows(LAYOUT, 2))


@pytest.mark.parametrize(
    ("ranks", "relays"), [((1, 1, 1), True), ((2, 2, 2), True), ((1, 2, 2), False), ((2, 3, 2), False)]
)
def test_pushes_are_relayed_only_if_no_two_ranks_need_the_same_piece(ranks: tuple[int, int, int], relays: bool) -> None:
    """Or the server would send the piece twice; an encoded result is cut for both."""
    holdings = {f"site-{place}": rows(LAYOUT, count) for place, count in enumerate(ranks)}
    world = Harness("diloco", holdings=holdings, every=2, aggregator="mean", up="bf16", down="bf16", relay=3)
    for _ in range(2):
        for name in world.names:
            world.step(name)
            world.up(name)
    (result,) = [message for message in world.to_site["site-1"] if isinstance(message, RoundResult)]
    assert bool(result.relayed) is relays
    parts = [part for held in holdings["site-1"] for part in result_parts(result, held)]
    segments = [
        segment for part in parts for segment in (*part.segments, *(s for p in part.relayed for s in p.segments or ()))
    ]
    each = 2 if relays else 1  # of the two other sites
    assert sum(segment.payload.numel for segment in segments) == each * N


PER_TENSOR: dict[str, dict[str, Any]] = {"weightgrad-paper": {"trigger": "significance(1.5, at_most=4, every=2)"}}


@pytest.mark.parametrize("name", [name for name, strategy in PRESETS.items() if strategy.per == "tensor"])
def test_ranks_that_hold_whole_tensors_encode_what_one_would(name: str) -> None:
    """Whatever the codec: what it sees is one tensor."""
    changes = PER_TENSOR.get(name, {})
    assert_same(run(name, holdings=WHOLE_TENSORS, **changes), run(name, **changes))


SHORT: dict[str, dict[str, Any]] = {
    "dgc": {"up": "dgc(0.1, momentum=0.0, warmup=5)"},
    "onebit": {"up": "warmup(2, onebit())", "down": "warmup(2, onebit())"},
    "adaptive": {"up": "warmup(2, adaptive(pi=64))"},
    "diloco": {"every": 3, "up": "ef(topk(0.2))", "down": "ef(qsgd(bits=4))"},
    "sparseloco": {"every": 2, "up": "ef(topk(0.1) > codebook(bits=2))"},
}


@pytest.mark.parametrize("limit", [6, 10, 23])
@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ("streaming", "weightgrad-paper")])
def test_the_number_of_replicas_changes_no_bit(name: str, limit: int) -> None:
    """Each codec sees the same pieces, whoever encodes them.

    Not so for two: the fragments of `streaming` are cut for themselves, so their pieces differ, and `weightgrad-paper`
    estimates the norm of a piece from what the rank holds of its tensor.
    """
    per_tensor = find(name).per == "tensor"
    holdings = {
        f"site-{place}": pieces.deal([WHOLE] * count, LAYOUT, per_tensor=per_tensor, limit=limit)
        for place, count in enumerate((2, 3, 1))
    }
    changes = SHORT.get(name, {})
    assert_same(run(name, limit=limit, holdings=holdings, **changes), run(name, limit=limit, **changes))


# DGC's own momentum makes its updates others than the gradients it is given; without it they are the same.
CHANGES: dict[str, dict[str, Any]] = {
    "dgc": {"up": "dgc(0.05, momentum=0.0, warmup=5)"},
    "streaming": {"trigger": "staggered(4, 4)"},
}
EVENTS = ["step", "step", "step", "up", "up", "down", "down", "crash_site", "crash_server", "time_out"]
schedules = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 2)), max_size=60)


def play(world: Harness, schedule: list[tuple[str, int]]) -> None:
    for what, who in schedule:
        if what in ("crash_server", "time_out"):
            getattr(world, what)()
        else:
            getattr(world, what)(world.names[who])
    world.finish()
    world.check()


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=schedules, limit=st.sampled_from([5, 12, pieces.PIECE]))
def test_nothing_is_lost_by_any_rank(name: str, schedule: list[tuple[str, int]], limit: int) -> None:
    with pieces_of(limit):
        play(Harness(name, holdings=SHARDED, **CHANGES.get(name, {})), schedule)


@pytest.mark.parametrize("consistency", ["sync", "bounded(2)", "backup(1)", "async_()"])
@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("resume", ["global_model", "global_model_and_residual(0.25)", "mix(0.5)"])
@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=schedules)
def test_nothing_of_a_fragment_is_lost(
    resume: str, overlap: int, consistency: str, schedule: list[tuple[str, int]]
) -> None:
    """What a round is not about stays where it is, also while a site waits for the round."""
    play(
        Harness(
            "streaming",
            holdings=SHARDED,
            trigger="staggered(4, 4)",
            resume=resume,
            overlap=overlap,
            consistency=consistency,
        ),
        schedule,
    )


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("codec", [None, "qsgd(bits=8)"])
def test_a_late_site_of_several_ranks_downloads_what_each_holds(name: str, codec: str | None) -> None:
    with pieces_of(9):
        world = Harness(name, sites=2, holdings={**SHARDED, "late": rows(LAYOUT, 3)}, **CHANGES.get(name, {}))
        while world.server.global_model.version < 3:
            for site in world.names:
                world.step(site)
                world.drain(site)
        end = world.come("late", codec)
        world.up("late")
        world.down("late")
        assert end.exact is (codec is None)
        if end.exact:  # it says so and is awaited; otherwise it trains while the exact model comes
            world.drain("late")
        assert world.step("late")
        world.drain("late")
        assert end.exact
        world.finish()
        world.check()


# -- what each rank is sent --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["diloco", "weightgrad", "onebit", "sparseloco"])
def test_a_rank_is_sent_no_byte_that_it_does_not_need(name: str) -> None:
    world = Harness(name, holdings=SHARDED, **SHORT.get(name, {}))
    results: list[RoundResult] = []
    while len(results) < 3:
        for site in world.names:
            world.step(site)
            world.up(site)
        for site in world.names:
            results += [m for m in world.to_site[site] if isinstance(m, RoundResult)]
            world.drain(site)
    for result in results:
        for ranks in SHARDED.values():
            received = [one for held in ranks for part in result_parts(result, held) for one in part.segments]
            assert sorted(id(one) for one in received) == sorted(id(one) for one in result.segments)
            for segment in result.segments:
                assert sum(held.contains(segment.intervals) for held in ranks) == 1


def test_results_are_cut_anew_when_a_site_is_sharded_otherwise() -> None:
    world = Harness("diloco", sites=1, every=1, down="ef(topk(0.5))", aggregator="mean")
    (site,) = world.names
    (shard,) = world.server.shards

    def segments() -> list[Segment]:
        world.step(site)
        world.up(site)
        (result,) = (m for m in world.to_site[site] if isinstance(m, RoundResult))
        world.drain(site)
        return list(result.segments)

    assert [one.intervals for one in segments()] == [WHOLE]
    shard.set_holdings(site, rows(LAYOUT, 2))
    assert [one.intervals for one in segments()] == sorted(rows(LAYOUT, 2), key=lambda own: own.first)
    shard.set_holdings(site, [WHOLE])
    assert [one.intervals for one in segments()] == [WHOLE]
    world.finish()
    world.check()


def test_the_ranks_of_a_site_apply_their_parts_alone() -> None:
    """As in a deployment, where a rank gets the segments that it holds some of and no others."""
    world = Harness("diloco", holdings=SHARDED, every=2, aggregator="mean", up="bf16", down="bf16")
    for _ in range(6):
        for site in world.names:
            world.step(site)
            world.up(site)
        for site in world.names:
            end = world.ends[site]
            while world.to_site[site]:
                world._send(site, end.receive(world.to_site[site].popleft(), world.now))
            while (found := end.coordinator.next_result()) is not None:
                order, result = found
                for shard in end.shards:
                    own = result_parts(result, shard.held)
                    received = tuple(segment for part in own for segment in part.segments)
                    shard.apply(order, replace(result, segments=received))
    assert world.server.global_model.version == 3
    world.finish()
    world.check()


# -- processes of the server -------------------------------------------------------------------

CUTS = {
    "two": cut_at(29),
    "three": cut_at(5, 36),
    "one with nothing": cut_at(11, 11),
    "scattered": [*SHARDED["site-2"]],
}


@pytest.mark.parametrize("row", ELEMENTWISE)
@pytest.mark.parametrize("cut", CUTS)
def test_processes_of_a_server_end_with_the_bits_of_one(row: str, cut: str) -> None:
    name, changes = ELEMENTWISE[row]
    assert_same(run(name, served=CUTS[cut], **changes), run(name, **changes))


@pytest.mark.parametrize("row", ELEMENTWISE)
def test_processes_and_ranks_together(row: str) -> None:
    name, changes = ELEMENTWISE[row]
    assert_same(run(name, limit=7, served=CUTS["three"], holdings=holdings_for(row), **changes), run(name, **changes))


@given(bounds=st.lists(st.integers(1, N - 1), min_size=1, max_size=2, unique=True).map(sorted))
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
def test_a_server_may_be_cut_anywhere(bounds: list[int]) -> None:
    name, changes = ELEMENTWISE["adam outside"]
    assert_same(run(name, 12, served=cut_at(*bounds), holdings=SHARDED, **changes), run(name, 12, **changes))


@pytest.mark.parametrize("name", [name for name, strategy in PRESETS.items() if strategy.per == "tensor"])
def test_processes_that_serve_whole_tensors_encode_what_one_would(name: str) -> None:
    changes = PER_TENSOR.get(name, {})
    served = tensors((0,), (1, 2), (3,))
    assert_same(run(name, served=served, holdings=WHOLE_TENSORS, **changes), run(name, **changes))


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=schedules, limit=st.sampled_from([5, pieces.PIECE]))
def test_nothing_is_lost_between_processes(name: str, schedule: list[tuple[str, int]], limit: int) -> None:
    with pieces_of(limit):
        play(Harness(name, served=CUTS["three"], holdings=SHARDED, **CHANGES.get(name, {})), schedule)


@pytest.mark.parametrize("name", PRESETS)
def test_a_site_downloads_from_all_processes(name: str) -> None:
    world = Harness(name, sites=2, served=CUTS["three"], holdings={"late": rows(LAYOUT, 3)}, **CHANGES.get(name, {}))
    while world.server.global_model.version < 3:
        for site in world.names:
            world.step(site)
            world.drain(site)
    end = world.come("late", None)
    world.up("late")
    (reply,) = world.to_site["late"]
    assert isinstance(reply, JoinReply)
    assert reply.downloads
    world.drain("late")
    assert end.digest() == world.server.global_model.digest()
    world.finish()
    world.check()


@pytest.mark.parametrize("relay", [0, 3])
@pytest.mark.parametrize("place", [0, 1, 3, 6])
def test_rounds_that_close_during_a_download_are_in_it_once(place: int, relay: int) -> None:
    """The server makes the parts of a download one by one, so later ones are of a later version."""
    with pieces_of(10):
        world = Harness("diloco", sites=2, every=1, aggregator="mean", up="bf16", down="bf16", relay=relay)
        one, _ = world.names
        for site in world.names:
            world.step(site)
        end = world.ends[one]
        (update,) = end.shards
        assert isinstance(update, UpdateShard)
        (push,) = world.to_server[one]
        assert isinstance(push, Push)
        update.begin_load(discards=False)
        download = world.server.shards[0].model_parts(WHOLE)
        for number in range(7):
            if number == place:  # a round closes, and its result comes before the parts that follow
                for site in world.names:
                    world.up(site)
                (result,) = (m for m in world.to_site[one] if isinstance(m, RoundResult))
                assert bool(result.relayed) is bool(relay)
                update.load_result(result)
            for segment in next(download).segments:
                update.load("weights", segment)
        assert next(download, None) is None
        update.end_load(LoadOrder(version=1, step=1, included=1, discards=False), {})
        assert torch.equal(update.global_model, world.server.global_model.vector)
        torch.testing.assert_close(end.model, update.global_model)
        assert not update.in_flight


# -- cost --------------------------------------------------------------------------------------


@contextmanager
def counted_decodes() -> Iterator[mock.Mock]:
    with mock.patch.object(messages, "decode_into", side_effect=decode_into) as counter:
        yield counter


@pytest.mark.parametrize("changes", [{"overlap": 3}, {"overlap": 3, "relay": 3, "down": "bf16"}], ids=str)
def test_a_round_decodes_each_segment_a_few_times_however_many_pieces_there_are(changes: dict[str, Any]) -> None:
    """Not once for every other piece: a model of a billion weights has five hundred."""
    each = {}
    for limit in (4, 1):
        with pieces_of(limit):
            world = Harness("diloco", sites=2, every=1, aggregator="mean", up="bf16", **changes)
            for _ in range(6):
                for site in world.names:
                    world.step(site)
                    world.drain(site)
            before = world.server.global_model.version
            with counted_decodes() as counter:
                for _ in range(4):
                    for site in world.names:
                        world.step(site)
                        world.drain(site)
            rounds = world.server.global_model.version - before
            assert rounds >= 3
            each[limit] = counter.call_count / rounds / (N / limit)
    assert each[1] == pytest.approx(each[4], rel=0.05)
    assert each[1] < 40


# -- weights in bfloat16 -----------------------------------------------------------------------

HALF: dict[str, dict[str, Any]] = {
    "waiting": {},
    "waiting for a lossy codec": {"up": "ef(topk(0.2))", "down": "ef(topk(0.4))"},
    "overlapped": {"up": "ef(topk(0.2))", "down": "ef(topk(0.4))", "overlap": 3},
    "a share of the residual": {"up": "ef(topk(0.2))", "resume": "global_model_and_residual(0.25)", "overlap": 3},
    "all of the residual": {"up": "ef(topk(0.2))", "resume": "global_model_and_residual", "overlap": 3},
    "mixed": {"up": "ef(qsgd(bits=4))", "resume": "mix(0.5)", "overlap": 3},
    "bounded": {"up": "ef(topk(0.2))", "consistency": "bounded(2)"},
    "relayed": {"up": "ef(topk(0.2) > sign())", "down": "ef(topk(0.2) > sign())", "relay": 3, "overlap": 2},
    "noise that is discarded": {"up": "qsgd(bits=4)", "keep_loss": False, "overlap": 2},
}


def half(row: str, holdings: Holdings | None) -> Harness:
    changes = {"every": 2, "aggregator": "mean", **HALF[row]}
    return Harness("diloco", half=True, holdings=holdings, **changes)


def is_half(values: Tensor) -> bool:
    return torch.equal(values, values.bfloat16().float())


@pytest.mark.parametrize("holdings", [None, SHARDED], ids=["one rank", "several"])
@pytest.mark.parametrize("row", HALF)
def test_a_site_that_does_nothing_pushes_no_rounding_errors(row: str, holdings: Holdings | None) -> None:
    """Its weights are the rounded global model; the difference is not an update of its own."""
    world = half(row, holdings)
    idle, *others = world.names
    sent = []
    for _ in range(30):
        for site in others:
            world.step(site)
        end = world.ends[idle]
        end.apply_results()
        if end.blocked(world.now) is None:
            world.now += 0.01
            messages = end.after_step(world.now)
            world._send(idle, messages)
            sent += messages
        for site in world.names * 2:
            world.drain(site)
        assert is_half(end.model)
    assert end.version > 5
    assert not is_half(end.global_model()), "the global model itself is not rounded"
    for push in world.made.values():
        if push.site == idle:
            values = torch.zeros(N)
            for segment in push.segments:
                segment.into(values, 1)
            assert not values.any()
    assert not end.residual().any()


@pytest.mark.parametrize("holdings", [None, SHARDED], ids=["one rank", "several"])
@pytest.mark.parametrize("row", HALF)
def test_weights_in_bfloat16_lose_no_more_than_they_round(row: str, holdings: Holdings | None) -> None:
    world = half(row, holdings)
    largest, writes = 0.0, 0
    for _ in range(30):
        for site in world.names:
            writes += world.step(site)
            world.drain(site)
        for site in world.names:
            world.drain(site)
            largest = max(largest, float(world.ends[site].model.abs().max()))
            assert is_half(world.ends[site].model)
    versions = world.server.global_model.version
    for site, end in world.ends.items():
        total = torch.zeros(N, dtype=torch.float64)
        for push in (push for push in world.made.values() if push.site == site):
            values = torch.zeros(N)
            for segment in push.segments:
                segment.into(values, 1)
            total += values.double()
        accounted = total + end.residual().double() + end.fresh_update().double() + world.forgotten[site]
        # A result rounds twice: the fresh update that the weights keep meanwhile, and the new weights.
        worst = 2 * versions * largest * 2.0**-9
        assert float((accounted - world.updates[site]).abs().max()) <= worst
        # And these errors go both ways.
        assert float((accounted - world.updates[site]).abs().mean()) <= worst / 4
    world.finish()
    assert len({end.digest() for end in world.ends.values()} | {world.server.global_model.digest()}) == 1


def test_the_local_model_in_bfloat16_is_the_rounded_reference_and_the_fresh_update() -> None:
    world = half("overlapped", None)
    for _ in range(12):
        for site in world.names:
            world.step(site)
            world.drain(site)
    for end in world.ends.values():
        (shard,) = end.shards
        reference = torch.zeros(N)
        out = shard.reference(WHOLE, torch.empty(N))  # type: ignore[attr-defined]
        reference.copy_(out)
        assert is_half(reference)
        assert torch.equal(end.model, reference + end.fresh_update())


def test_a_state_of_several_ranks_says_where_each_waits() -> None:
    """A round is about one tensor, of which only some ranks hold a part."""
    changes: dict[str, Any] = {
        "trigger": "staggered(2, 2)",
        "selector": "fragment(2)",
        "overlap": 0,
        "resume": "global_model",
    }
    world = Harness("streaming", sites=1, **changes)

    def made() -> SiteState:
        held, plan = tensors((0,), (1, 2), (3,)), world.strategy.for_site()
        return SiteState("a", world._global_model(), plan, samples=4, key=1, holdings=held)

    one, again = made(), made()
    one.receive(JoinReply(version=0, round=1, step=0, included=0), 0.0)
    one.model += noise(1)
    (push,) = one.after_step(0.0)
    assert one.blocked(0.0) == "result"
    assert ["waiting" in shard.state() for shard in one.shards] == [False, True, True]
    again.load(one.state())
    assert torch.equal(again.fresh_update(), one.fresh_update())
    pushed = Intervals.of(span for segment in push.segments for span in segment.intervals.spans)  # type: ignore[union-attr]
    rest = WHOLE - pushed
    torch.testing.assert_close(at(one.fresh_update(), rest), at(noise(1), rest))
    assert not at(one.fresh_update(), pushed).any()

"""What the guard lets into the global model and what not, alone and in front of a global server."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from weightgrad import codecs
from weightgrad.codecs import Payload
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.guard import Guard
from weightgrad.core.result_log import MemoryResultLog
from weightgrad.core.server_shard import ServerShard
from weightgrad.core.server_state import ServerState
from weightgrad.core.strategies import find
from weightgrad.errors import NonFiniteError, StrategyError
from weightgrad.wire.messages import Join, Push, Segment, nbytes

from .harness import LAYOUT, noise

N = LAYOUT.numel
START = noise(99)
UNIT = torch.ones(N) / math.sqrt(N)
BAD = [math.nan, math.inf, -math.inf]


def raw(values: Tensor) -> Payload:
    """float32 as it is; the encoder would not write what is not finite."""
    return Payload("fp32", torch.float32, tuple(values.shape), b"", values.clone().view(torch.uint8))


def push(round_: int, update: Tensor | None = None, *, site: str = "virginia", **more: Any) -> Push:
    settings = {"after": round_ - 1, "step": round_, "seen": round_ - 1, "samples": 4, **more}
    return Push(site=site, round=round_, segments=() if update is None else (Segment(0, raw(update)),), **settings)


def shard() -> ServerShard:
    model = GlobalModel(LAYOUT, START, optimizer=None, rate=lambda step: 1.0)
    return ServerShard(model, find("diloco").for_server().for_shard, 1, MemoryResultLog(1))


def check(guard: Guard, one: Push) -> str | None:
    """What the guard says to what a server process finds out about a push."""
    return guard.check(replace(one, segments=()), shard().receive(one.site, one.round, one.segments))


def warmed(*norms: float, **settings: Any) -> Guard:
    guard = Guard(**settings)
    for number, norm in enumerate(norms or [1.0] * 5, 1):
        assert check(guard, push(number, norm * UNIT)) is None
    return guard


def spoilt(value: float, place: int = 17) -> Tensor:
    update = noise(1)
    update[place] = value
    return update


# -- alone ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", BAD)
def test_what_is_not_finite_is_refused_from_the_first_push_on(value: float) -> None:
    assert check(Guard(), push(12, spoilt(value))) == "update of virginia at round 12 is not finite"


@pytest.mark.parametrize("value", BAD)
def test_it_is_found_in_any_part_and_inside_any_codec(value: float) -> None:
    good, bad = Segment(0, raw(noise(1)[:30])), Segment(30, raw(spoilt(value, 40)[30:]))
    assert check(Guard(), replace(push(1), segments=(good, bad))) is not None
    payload, _ = codecs.parse("qsgd(bits=4)").encode(noise(1), {}, 1)
    body = payload.body.clone()
    body[:4].view(torch.float32)[0] = value  # a scale
    poisoned = Segment(0, replace(payload, body=body))
    assert check(Guard(), replace(push(1), segments=(poisoned,))) is not None


def test_a_huge_update_is_refused_in_words_that_say_how_huge() -> None:
    guard = warmed(20, 28.7, 25, 21, 22)
    assert check(guard, push(6, 3.2e5 * UNIT)) == (
        "update of virginia at round 6 has norm 3.2e+05, 1.11e+04 times the largest of its last 5 (28.7)"
    )


def test_the_norm_is_that_of_all_parts_together() -> None:
    guard = warmed(factor=2.0)
    halves = tuple(Segment(i * N // 2, raw(9 * UNIT[: N // 2])) for i in range(2))
    why = check(guard, replace(push(6), segments=halves))
    assert why is not None
    assert "norm 9," in why


def test_what_is_finite_but_would_overflow_in_a_sum_or_a_square_is_refused_at_once() -> None:
    why = check(Guard(), push(1, torch.full((N,), torch.finfo(torch.float32).max)))
    assert why == "update of virginia at round 1 has norm 2.72e+39, more than any training makes (1e+12)"
    one = server(sites="a", aggregator="outer('adam')")
    for number in range(1, 9):
        assert not one.receive(push(number, 0.99e12 * UNIT, site="a"), 0.0).refused
    assert bool(one.global_model.vector.isfinite().all())


def test_the_first_pushes_may_be_of_any_size() -> None:
    assert check(warmed(1e-6, 1e6, 1.0, 1e-3, 1e9), push(6, UNIT)) is None
    assert check(warmed(1, 1, 1, 1), push(5, 1e9 * UNIT)) is None


def test_growth_within_the_factor_is_accepted_and_moves_the_limit() -> None:
    warmed(*[15.0 ** (n - 10) for n in range(20)])


def test_the_limit_is_exactly_the_factor() -> None:
    assert check(warmed(), push(6, 19.99 * UNIT)) is None
    assert check(warmed(), push(6, 20.01 * UNIT)) is not None


def test_only_the_window_counts() -> None:
    guard = warmed(100, 1, 1, 1, 1, 1, window=5)
    assert check(guard, push(7, 50 * UNIT)) is not None
    assert check(warmed(100, 1, 1, 1, 1, 1, window=6), push(7, 50 * UNIT)) is None


def test_what_is_refused_is_not_remembered() -> None:
    guard = warmed()
    for number in range(6, 30):
        assert check(guard, push(number, 1e3 * UNIT)) is not None
    assert check(guard, push(30, UNIT)) is None


def test_a_final_push_may_be_ten_times_larger_still() -> None:
    assert check(warmed(), push(6, 190 * UNIT, final=True)) is None
    assert check(warmed(), push(6, 210 * UNIT, final=True)) is not None


def test_empty_pushes_and_zeros_are_accepted_and_say_nothing_of_what_is_usual() -> None:
    guard = Guard()
    for number in range(1, 20):
        assert check(guard, push(number, torch.zeros(N) if number % 2 else None)) is None
    assert guard.state() == {}
    assert check(guard, push(20, UNIT)) is None


def test_sites_are_compared_with_themselves() -> None:
    guard = warmed()
    assert check(guard, push(1, 1e6 * UNIT, site="tokyo")) is None
    assert check(guard, push(6, 1e6 * UNIT)) is not None


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ([(1, N)], f"has a segment at 1 to {N + 1}, which is not served here"),
        ([(-1, 4)], "has a segment at -1 to 3, which is not served here"),
        ([(10**15, 1)], "which is not served here"),
        ([(0, 8), (4, 8)], "has segments that overlap: the interval 4 to 12 overlaps"),
        ([(8, 8), (0, 4), (12, 2)], "has segments that overlap"),
    ],
)
def test_segments_outside_the_global_model_or_that_overlap_are_refused(
    places: list[tuple[int, int]], said: str
) -> None:
    made = tuple(Segment(start, raw(torch.ones(numel))) for start, numel in places)
    why = check(Guard(), replace(push(3), segments=made))
    assert why is not None
    assert why.startswith("update of virginia at round 3 has ")
    assert said in why


def test_segments_may_come_in_any_order() -> None:
    """Those of several ranks do."""
    made = tuple(Segment(start, raw(torch.ones(8))) for start in (8, 0))
    assert check(Guard(), replace(push(3), segments=made)) is None


def test_a_part_that_says_it_is_larger_than_memory_is_not_made_room_for() -> None:
    huge = Segment(0, replace(raw(torch.ones(1)), shape=(2**40,)))
    assert check(Guard(), replace(push(1), segments=(huge,))) is not None


@pytest.mark.parametrize(
    "payload",
    [replace(raw(torch.ones(4)), shape=(5,)), replace(raw(torch.ones(4)), codec="martian")],
    ids=["short body", "unknown codec"],
)
def test_what_cannot_be_decoded_is_refused(payload: Payload) -> None:
    why = check(Guard(), replace(push(3), segments=(Segment(0, payload),)))
    assert why is not None
    assert why.startswith("update of virginia at round 3 cannot be decoded: ")


@pytest.mark.parametrize("spec", ["fp16", "qsgd(bits=4)", "terngrad", "topk(0.1) > sign()", "onebit(feedback=False)"])
def test_it_measures_what_the_server_will_decode(spec: str) -> None:
    payload, _ = codecs.parse(spec).encode(noise(1).view(2, -1), {}, 1)
    guard = Guard()
    assert check(guard, replace(push(1), segments=(Segment(0, payload),))) is None
    (norm,) = guard.state()["virginia"].tolist()
    assert norm == pytest.approx(float(codecs.decode(payload).norm()), rel=1e-5)


def test_state_goes_through_tensors() -> None:
    first = warmed(1, 2, 3, 4, 5, 6, window=5)
    assert first.state()["virginia"].tolist() == pytest.approx([2, 3, 4, 5, 6])
    again = Guard()
    check(again, push(1, UNIT, site="tokyo"))
    again.load(first.state())
    assert list(again.state()) == ["virginia"]
    assert check(again, push(7, 121 * UNIT)) == check(first, push(7, 121 * UNIT)) is not None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"factor": 0.5}, "factor = 0.5"),
        ({"factor": math.nan}, "factor = nan"),
        ({"window": 0}, "window = 0"),
        ({"warm": 0}, "warm = 0"),
        ({"window": 3}, "warm = 5 of a window of 3"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        Guard(**settings)


# -- in front of a global server ------------------------------------------------------------


def server(*, guard: bool = True, sites: str = "abc", **changes: Any) -> ServerState:
    strategy = find("diloco", {"aggregator": "mean", **changes})
    global_model = GlobalModel(LAYOUT, START, optimizer=None, rate=lambda step: 1.0)
    made = ServerState(global_model, strategy.for_server(), 1, Guard() if guard else None)
    for site in sites:
        made.receive(Join(site=site, version=0), 0.0)
    return made


def rounds(one: ServerState, numbers: range, sites: str = "abc") -> None:
    for number in numbers:
        for i, site in enumerate(sites):
            assert not one.receive(push(number, noise(i, number), site=site), 0.0).refused
        assert one.global_model.version == number


@pytest.mark.parametrize("bad", [spoilt(math.nan), spoilt(math.inf), 1e4 * noise(1)], ids=["nan", "inf", "huge"])
def test_a_poisoned_push_is_an_empty_one_and_everybody_goes_on(bad: Tensor) -> None:
    one = server()
    rounds(one, range(1, 6))
    before = one.global_model.vector.clone()
    poisoned = push(6, bad, site="b")
    out = one.receive(poisoned, 0.0)
    ((site, why),) = out.refused
    assert site == "b"
    assert why.startswith("update of b at round 6 ")
    one.receive(push(6, noise(1), site="a"), 0.0)
    out = one.receive(push(6, noise(2), site="c"), 0.0)
    assert not out.refused
    (closed,) = out.closed
    assert closed.senders == ["a", "b", "c"]
    assert closed.result.included == {"a": 6, "b": 6, "c": 6}, "b must not send it again"
    assert closed.up_bytes == 3 * nbytes(poisoned), "it did cross the link"
    torch.testing.assert_close(one.global_model.vector, before + (noise(1) + noise(2)) / 3)
    rounds(one, range(7, 9))


def test_a_huge_first_push_is_accepted() -> None:
    one = server(sites="a")
    assert not one.receive(push(1, 1e4 * noise(1), site="a"), 0.0).refused
    torch.testing.assert_close(one.global_model.vector, START + 1e4 * noise(1))


def test_growth_is_accepted() -> None:
    one = server(sites="a")
    for number in range(1, 12):
        assert not one.receive(push(number, 3.0**number * UNIT, site="a"), 0.0).refused


def test_a_push_that_comes_twice_is_judged_once() -> None:
    one = server(sites="ab")
    for _ in range(10):
        one.receive(push(1, UNIT, site="a"), 0.0)
    assert one.checkpoint()["guard.a"].numel() == 1
    assert one.receive(push(1, spoilt(math.nan), site="b"), 0.0).refused
    assert not one.receive(push(1, spoilt(math.nan), site="b"), 0.0).refused
    one.receive(push(3, UNIT, site="a"), 0.0)  # out of turn: it will come again
    assert one.checkpoint()["guard.a"].numel() == 1


def test_a_refused_final_push_still_ends_the_sites_training() -> None:
    one = server(sites="ab")
    assert one.receive(push(1, spoilt(math.nan), site="a", final=True), 0.0).refused
    assert one.receive(push(1, UNIT, site="b"), 0.0).closed
    assert one.receive(push(2, UNIT, site="b"), 0.0).closed


@pytest.mark.parametrize(
    "changes",
    [{"aggregator": "median"}, {"aggregator": "sender_mean"}, {"consistency": "async_(compensate=0.5)"}],
    ids=str,
)
def test_nothing_poisonous_reaches_other_aggregators(changes: dict[str, Any]) -> None:
    one = server(**changes)
    for i, site in enumerate("abc"):
        out = one.receive(push(1, spoilt(math.nan) if site == "b" else noise(i), site=site), 0.0)
        assert bool(out.refused) == (site == "b")
    assert bool(one.global_model.vector.isfinite().all())
    assert not torch.equal(one.global_model.vector, START)


def test_what_is_usual_survives_a_checkpoint() -> None:
    first = server()
    rounds(first, range(1, 6))
    again = server(sites="")
    again.restore(first.checkpoint())
    assert again.receive(push(6, 1e3 * noise(1), site="b"), 0.0).refused
    for site in "ac":
        assert not again.receive(push(6, noise(1), site=site), 0.0).refused
    rounds(again, range(7, 8))


def test_a_checkpoint_fits_servers_with_and_without_a_guard() -> None:
    guarded, plain = server(), server(guard=False)
    for one in (guarded, plain):
        rounds(one, range(1, 6))
    assert {k for k in guarded.checkpoint() if k.startswith("guard.")} == {"guard.a", "guard.b", "guard.c"}
    assert not [k for k in plain.checkpoint() if k.startswith("guard.")]
    assert guarded.global_model.digest() == plain.global_model.digest()
    newly = server(sites="")
    newly.restore(plain.checkpoint())
    rounds(newly, range(6, 8))
    without = server(sites="", guard=False)
    without.restore(guarded.checkpoint())
    rounds(without, range(6, 8))
    assert newly.global_model.digest() == without.global_model.digest()


def test_without_a_guard_one_site_stops_them_all() -> None:
    one = server(guard=False, sites="ab")
    assert not one.receive(push(1, spoilt(math.nan), site="a"), 0.0).refused
    with pytest.raises(NonFiniteError):
        one.receive(push(1, UNIT, site="b"), 0.0)

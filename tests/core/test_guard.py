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
from weightgrad.core.server.guard import CREDIT, Guard, Verdict, Weighed
from weightgrad.core.server.push_facts import PushFacts
from weightgrad.core.server.result_log import MemoryResultLog
from weightgrad.core.server.shard import ServerShard
from weightgrad.core.server.state import ServerState
from weightgrad.core.strategies import find
from weightgrad.errors import NonFiniteError, StrategyError
from weightgrad.wire.message_sizes import nbytes
from weightgrad.wire.messages import Join, Push, Segment

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


def facts_of(one: Push) -> PushFacts:
    """What a server process finds out about a push."""
    return shard().receive(one.site, one.round, one.segments)


def check(guard: Guard, one: Push) -> str | None:
    """What the guard says to a push by itself."""
    return guard.problem(replace(one, segments=()), facts_of(one))


def close(guard: Guard, *, plausible: float = 0.0, final: str = "", round_: int = 1, **norms: Any) -> dict[str, str]:
    """What the guard says to the pushes of a round, by site."""
    pushes = [Weighed(push(round_, site=site, final=site in final), norm) for site, norm in norms.items()]
    return {site: why for (site, _), why in guard.judge(pushes, plausible).refused.items()}


def warmed(rounds: int = 5, *, guard: Guard | None = None, **norms: Any) -> Guard:
    made = guard or Guard()
    for _ in range(rounds):
        assert not close(made, **norms)
    return made


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


def test_what_is_finite_but_would_overflow_in_a_sum_or_a_square_is_refused_at_once() -> None:
    why = check(Guard(), push(1, torch.full((N,), torch.finfo(torch.float32).max)))
    assert why == "update of virginia at round 1 has norm 2.72e+39, more than any training makes (1e+12)"
    one = server(sites="a", aggregator="outer('adam')")
    for number in range(1, 9):
        assert not one.receive(push(number, 0.99e12 * UNIT, site="a"), 0.0).refused
    assert bool(one.global_model.vector.isfinite().all())


# -- compared, when a round closes ----------------------------------------------------------


def test_from_the_first_push_on_a_site_is_compared_with_the_others() -> None:
    why = close(Guard(), a=1.0, b=1.2, c=1e6)
    assert list(why) == ["c"], "the right site is named"
    assert why["c"] == (
        "update of c at round 1 has norm 1e+06, more than 20 times what is usual for the other sites (1.2)"
    )


def test_one_liar_cannot_have_an_honest_site_refused() -> None:
    for lie in (1e-9, 1e9):
        guard = Guard()
        for _ in range(30):
            assert not {"a", "b"} & close(guard, a=1.0, b=1.5, c=lie).keys()


def test_however_patient_a_site_cannot_raise_its_own_limit() -> None:
    guard, norm, largest = Guard(), 1.0, 0.0
    for _ in range(400):
        if not close(guard, a=1.0, b=1.0, c=norm):
            largest, norm = norm, norm * 1.2
    assert largest <= 20.0


def test_with_two_sites_growth_beyond_the_other_is_slow() -> None:
    guard, norm, largest = warmed(a=1.0, b=1.0), 1.0, 0.0
    for _ in range(50):
        for factor in (19.0, 4.0, 1.3):
            if not close(guard, a=1.0, b=factor * norm):
                largest = max(largest, factor * norm)
                norm *= 1.2
                break
    assert largest < 20 * 1.5**10, "not 19 to the power of 50"


def test_of_two_sites_neither_can_have_the_other_refused_once_there_is_a_past() -> None:
    guard = warmed(a=1.0, b=1.0)
    for _ in range(50):
        assert not close(guard, a=1.0, b=1e-9)


def test_of_two_sites_the_first_push_may_have_the_norm_of_the_model() -> None:
    assert not close(Guard(), plausible=30.0, a=29.0, b=1e-9)
    assert list(close(Guard(), plausible=30.0, a=31.0, b=1e-9)) == ["a"]
    assert not close(Guard(), plausible=30.0, a=31.0, b=2.0), "or what is twenty times that of the other"


def test_a_site_alone_is_compared_with_its_own_past() -> None:
    guard = Guard()
    for norm in (1e-6, 1e6, 1.0, 1e-3, 1e9):
        assert not close(guard, a=norm)
    assert not close(guard, a=19e9)
    assert list(close(guard, a=1e12)) == ["a"]


def test_the_limit_is_exactly_the_factor() -> None:
    assert not close(warmed(a=1.0, b=1.0, c=1.0), c=19.99)
    assert close(warmed(a=1.0, b=1.0, c=1.0), c=20.01)
    assert close(warmed(a=1.0, b=1.0, c=1.0, guard=Guard(factor=2.0)), c=2.01)


def test_what_is_usual_follows_the_training() -> None:
    guard = warmed(guard=Guard(window=5), a=100.0, b=100.0, c=100.0)
    assert not close(guard, c=1500.0)
    for _ in range(8):
        close(guard, a=1.0, b=1.0, c=1.0)
    assert close(guard, c=1500.0)
    assert not close(guard, a=1.0, b=1.0, c=15.0)


@pytest.mark.parametrize("sites", ["abc", "ab", "abcd"])
def test_norms_may_grow_at_all_sites_at_once(sites: str) -> None:
    """As they do when the learning rate warms up, or `auto` chooses longer rounds."""
    small: dict[str, Any] = dict.fromkeys(sites, 0.01)
    guard = warmed(10, **small)
    for norm in (0.1, 5.0, 500.0, 0.1, 500.0):
        grown: dict[str, Any] = {site: norm * (1 + place / 10) for place, site in enumerate(sites)}
        verdict = judged(guard, **grown)
        assert not verdict.refused
        assert not verdict.scales


def test_what_is_refused_is_not_remembered() -> None:
    guard = warmed(a=1.0, b=1.0, c=1.0)
    before = guard.state()["c"].tolist()
    for _ in range(30):
        assert list(close(guard, a=1.0, b=1.0, c=1e3)) == ["c"]
    assert guard.state()["c"].tolist() == before
    assert not close(guard, a=1.0, b=1.0, c=1.0)


def test_the_final_push_may_be_ten_times_larger_once() -> None:
    guard = warmed(a=1.0, b=1.0, c=1.0)
    assert list(close(guard, a=1.0, b=1.0, c=210.0, final="c")) == ["c"]
    assert not close(guard, a=1.0, b=1.0, c=190.0, final="c")
    assert list(close(guard, a=1.0, b=1.0, c=190.0, final="c")) == ["c"], "a last push is the last one"


def test_empty_pushes_and_zeros_are_accepted_and_say_nothing_of_what_is_usual() -> None:
    guard = warmed(20, a=0.0, b=0.0)
    assert guard.state() == {}
    assert not close(guard, a=1.0, b=0.0)


def test_a_site_that_comes_late_is_compared_with_those_that_are_there() -> None:
    assert list(close(warmed(a=1.0, b=1.0), tokyo=1e6)) == ["tokyo"]
    assert not close(warmed(a=1.0, b=1.0), tokyo=3.0)


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
    found = facts_of(replace(push(1), segments=(Segment(0, payload),)))
    assert math.sqrt(found.squares) == pytest.approx(float(codecs.decode(payload).norm()), rel=1e-5)


def test_state_goes_through_tensors() -> None:
    first = Guard(window=5)
    for norm in range(1, 7):
        assert not close(first, a=norm, b=norm, final="b" if norm == 6 else "")
    again = warmed(tokyo=1.0)
    again.load(first.state())
    assert list(again.state()) == ["a", "b"]
    assert all(torch.equal(first.state()[site], again.state()[site]) for site in "ab")
    for guard in (first, again):
        assert close(guard, a=4.0, b=4.0 * 190, final="b"), "it has finished before"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"factor": 0.5}, "factor = 0.5"),
        ({"factor": math.nan}, "factor = nan"),
        ({"window": 0}, "window = 0"),
        ({"share": 0.1}, "share = 0.1"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        Guard(**settings)


# -- accounts -------------------------------------------------------------------------------


def judged(guard: Guard, *, weights: dict[str, float] | None = None, final: str = "", **norms: Any) -> Verdict:
    found = [
        Weighed(push(1, site=site, final=site in final), norm, (weights or {}).get(site, 1.0))
        for site, norm in norms.items()
    ]
    return guard.judge(found)


def counted(guard: Guard, rounds: int, *, claims: float = 1.0, **norms: Any) -> float:
    """What "c" adds in so many rounds."""
    total = 0.0
    for _ in range(rounds):
        verdict = judged(guard, weights={"c": claims}, **norms)
        if ("c", 1) not in verdict.refused:
            total += claims * norms["c"] * verdict.scales.get(("c", 1), 1.0)
    return total


@pytest.mark.parametrize("claims", [1.0, 10.0])
@pytest.mark.parametrize("norm", [0.1, 1.0, 1.5, 1.9, 2.9, 5.0, 19.0])
def test_in_any_rounds_a_site_adds_less_than_the_others_together(norm: float, claims: float) -> None:
    """Whatever it sends, and however much it claims to weigh; a and b add 2 in a round."""
    for rounds in (1, 3, 10, 100):
        assert counted(Guard(), rounds, claims=claims, a=1.0, b=1.0, c=norm) <= CREDIT["updates"] + 1.5 * rounds


def test_a_site_may_add_as_much_as_it_is_declared_to_be_large() -> None:
    """Two sites of one worker, and one of eight, which claims as many samples."""
    norms = dict.fromkeys("abc", 1.0)
    assert counted(Guard(), 100, claims=8.0, **norms) < 200
    assert counted(Guard(sizes={"a": 1, "b": 1, "c": 8}), 100, claims=8.0, **norms) == 800
    for claims in (24.0, 80.0):
        assert counted(Guard(sizes={"a": 1, "b": 1, "c": 8}), 100, claims=claims, **norms) <= 8 * 152


@pytest.mark.parametrize("size", [0, -1.0, math.nan, "two"])
def test_a_size_that_makes_no_sense(size: Any) -> None:
    with pytest.raises(StrategyError, match="the size of tokyo"):
        Guard(sizes={"tokyo": size})


def test_more_sites_may_differ_more() -> None:
    norms: dict[str, Any] = dict.fromkeys("abdefghi", 1.0)
    assert counted(Guard(), 100, c=5.9, **norms) == pytest.approx(590.0), "eight others add more than 0.75 * 8"
    assert counted(Guard(), 100, c=5.9, a=1.0, b=1.0, d=1.0) < 50


def test_what_is_too_large_now_and_then_counts_in_full() -> None:
    guard = Guard()
    for number in range(60):
        verdict = judged(guard, a=1.0, b=1.0, c=3.0 if number % 6 == 5 else 1.0)
        assert not verdict.refused
        assert not verdict.scales


def test_credit_has_to_be_earned() -> None:
    assert judged(Guard(), a=1.0, b=1.0, c=3.4).scales == {("c", 1): pytest.approx(2.0 / 3.4)}
    assert not judged(warmed(10, a=1.0, b=1.0, c=1.0), a=1.0, b=1.0, c=3.4).scales


def test_a_site_that_is_too_large_every_time_is_refused_until_it_is_not() -> None:
    guard = Guard()
    counted(guard, 5, a=1.0, b=1.0, c=5.0)
    (why,) = judged(guard, a=1.0, b=1.0, c=5.0).refused.values()
    assert why == (
        "update of c at round 1 weighs 5 times as much as is usual for the other sites, and those before it did so too"
    )
    assert judged(guard, a=1.0, b=1.0, c=1.8).scales == {("c", 1): pytest.approx(1 / 1.8)}
    assert not judged(guard, a=1.0, b=1.0, c=1.0).scales


def test_a_site_that_sends_nothing_gets_nobody_into_debt() -> None:
    guard = Guard()
    for _ in range(100):
        verdict = judged(guard, a=1.0, b=1.4, c=1e-9)
        assert not verdict.refused
        assert not verdict.scales


def test_a_site_that_is_late_or_lost_still_stands_for_what_is_usual() -> None:
    guard = warmed(10, a=1.0, b=1.0, c=1.0)
    assert counted(guard, 50, a=1.0, c=5.0) <= CREDIT["updates"] + 1.5 * 50
    for _ in range(50):
        verdict = judged(guard, a=1.2, c=0.5)
        assert not verdict.refused
        assert not verdict.scales, "two that go on without the third are limited by nothing"


def test_a_site_that_has_just_joined_counts_in_full_and_limits_a_large_one() -> None:
    guard = Guard()
    for _ in range(20):
        judged(guard, a=1.0, c=5.0)
    verdict = judged(guard, a=1.0, b=1.1, c=5.0)
    assert list(verdict.scales) == [("c", 1)]
    assert not verdict.refused
    assert list(judged(guard, a=1.0, b=1.1, c=5.0).refused) == [("c", 1)]


def test_two_sites_have_no_accounts() -> None:
    guard = Guard()
    for _ in range(100):
        verdict = judged(guard, a=1.0, b=5.0)
        assert not verdict.refused
        assert not verdict.scales


def test_a_last_push_is_compared_with_those_of_the_others() -> None:
    """It holds what many rounds have kept. The first to finish may send ten times what is usual; then it is known."""
    alone = judged(warmed(10, a=1.0, b=1.0, c=1.0), a=1.0, b=1.0, c=11.0, final="c")
    assert not alone.scales
    together = judged(warmed(10, a=1.0, b=1.0, c=1.0), a=1.0, b=1.0, c=11.0, final="abc")
    assert together.scales[("c", 1)] < 0.5
    guard = warmed(10, a=1.0, b=1.0, c=1.0)
    assert not judged(guard, a=9.0, b=9.0, c=1.0, final="ab").scales
    assert not judged(guard, c=9.0, final="c").scales


def test_when_the_others_have_finished_a_site_in_debt_moves_nothing_any_more() -> None:
    guard = Guard()
    counted(guard, 5, a=1.0, b=1.0, c=5.0)
    judged(guard, a=1.0, b=1.0, c=5.0, final="ab")
    for norm in (5.0, 1.9, 0.5):
        assert judged(guard, c=norm).refused
    good = warmed(10, a=1.0, b=1.0, c=1.0)
    judged(good, a=1.0, b=1.0, c=1.0, final="ab")
    for _ in range(20):
        assert not judged(good, c=1.0).refused, "one that is not goes on alone"


def test_accounts_survive_a_checkpoint() -> None:
    first, again = Guard(), Guard()
    counted(first, 5, a=1.0, b=1.0, c=5.0)
    again.load(first.state())
    assert judged(again, a=1.0, b=1.0, c=5.0).refused


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
    refused = list(one.receive(poisoned, 0.0).refused)
    one.receive(push(6, noise(1), site="a"), 0.0)
    out = one.receive(push(6, noise(2), site="c"), 0.0)
    ((site, why),) = [*refused, *out.refused]
    assert site == "b"
    assert why.startswith("update of b at round 6 ")
    (closed,) = out.closed
    assert closed.senders == ["a", "b", "c"]
    assert closed.result.included == {"a": 6, "b": 6, "c": 6}, "b must not send it again"
    assert closed.up_bytes == 3 * nbytes(poisoned), "it did cross the link"
    torch.testing.assert_close(one.global_model.vector, before + (noise(1) + noise(2)) / 2)  # it does not weigh either
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
    assert one.receive(push(1, spoilt(math.nan), site="b"), 0.0).refused
    assert not one.receive(push(1, spoilt(math.nan), site="b"), 0.0).refused
    one.receive(push(1, UNIT, site="a"), 0.0)
    assert one.checkpoint()["guard.a"].tolist()[3:] == [pytest.approx(1.0)]


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
    again.receive(push(6, 1e3 * noise(1), site="b"), 0.0)
    again.receive(push(6, noise(1), site="a"), 0.0)
    assert [site for site, _ in again.receive(push(6, noise(1), site="c"), 0.0).refused] == ["b"]
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

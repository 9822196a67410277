"""What the server makes of the pushes of a round."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weightgrad import codecs
from weightgrad.codecs import Fp32
from weightgrad.core.local_model import Scratch
from weightgrad.core.parts import aggregators
from weightgrad.core.parts.aggregators import Aggregator, Contribution, Memory, SenderMean, relayed_shares
from weightgrad.errors import ProtocolError, StrategyError
from weightgrad.kernels import fixed
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.messages import RelayedPush, Segment

from .harness import LAYOUT, at, noise

N = LAYOUT.numel
WHOLE = Intervals.whole(N)
ALL = [
    aggregators.Mean(),
    aggregators.SenderMean(),
    aggregators.Sum(),
    aggregators.Median(),
    aggregators.TrimmedMean(1),
    aggregators.Outer("nesterov"),
    aggregators.Outer("sgd"),
    aggregators.Outer("adam"),
]


def whole(x: Tensor, start: int = 0) -> tuple[Segment, ...]:
    return (Segment(start, Fp32().encode(x, {}, 0)[0]),)


def contributions(pushes: list[tuple[Segment, ...]], weights: list[float] | None = None) -> list[Contribution]:
    return [
        Contribution(site=f"site-{i}", round=1, weight=1.0 if weights is None else weights[i], segments=push)
        for i, push in enumerate(pushes)
    ]


def combine(
    aggregator: Aggregator, pushes: list[Contribution], memory: Memory | None = None, intervals: Intervals = WHOLE
) -> Tensor | None:
    """What some elements move by; a copy, because the next call uses its memory again."""
    memory, weight = Memory(WHOLE) if memory is None else memory, sum(push.weight for push in pushes)
    found = aggregator.combine(pushes, intervals, weight, memory, Scratch())
    return None if found is None else found.clone()


def close(aggregator: Aggregator, pushes: list[Tensor], weights: list[float] | None = None) -> Tensor:
    found = combine(aggregator, contributions([whole(push) for push in pushes], weights))
    assert found is not None
    return found


def test_mean() -> None:
    x = [noise(i) for i in range(3)]
    torch.testing.assert_close(close(aggregators.Mean(), x), torch.stack(x).mean(0))


def test_mean_by_samples() -> None:
    x = [noise(i) for i in range(2)]
    torch.testing.assert_close(close(aggregators.Mean(), x, [1.0, 3.0]), (x[0] + 3 * x[1]) / 4)


def test_a_site_that_sent_nothing_counts_as_zero_in_the_mean() -> None:
    found = combine(aggregators.Mean(), contributions([whole(noise(1)), ()]))
    assert found is not None
    torch.testing.assert_close(found, noise(1) / 2)


@pytest.mark.parametrize("aggregator", ALL, ids=str)
def test_a_round_of_nothing_moves_nothing(aggregator: Aggregator) -> None:
    assert combine(aggregator, contributions([()])) is None
    assert combine(aggregator, contributions([whole(noise(1)[:6], 30), ()]), intervals=Intervals(((40, 50),))) is None


def test_sum() -> None:
    x = [noise(i) for i in range(3)]
    torch.testing.assert_close(close(aggregators.Sum(), x), x[0] + x[1] + x[2])


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 0.5), (4.0, 0.25)])
def test_sender_mean_divides_each_entry_by_those_who_sent_it(weights: tuple[float, float]) -> None:
    a, b = torch.zeros(N), torch.zeros(N)
    a[0], a[1], b[1], b[2] = 3.0, 4.0, 8.0, 5.0
    found = close(aggregators.SenderMean(), [a, b], list(weights))
    both = (weights[0] * 4 + weights[1] * 8) / sum(weights)
    torch.testing.assert_close(found[:4], torch.tensor([3.0, both, 5.0, 0.0]))


@pytest.mark.parametrize("silent", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (4.0, 0.25, 2.0)])
def test_silent_sites_count_in_part(silent: float, weights: tuple[float, float, float]) -> None:
    a, b = torch.zeros(N), torch.zeros(N)
    a[0], a[1], b[1] = 3.0, 4.0, 8.0
    found = close(aggregators.SenderMean(silent=silent), [a, b, torch.zeros(N)], list(weights))
    whole, alone, both = sum(weights), weights[0], weights[0] + weights[1]
    wanted = [
        3.0 * weights[0] / (alone ** (1 - silent) * whole**silent),
        (4.0 * weights[0] + 8.0 * weights[1]) / (both ** (1 - silent) * whole**silent),
        0.0,
    ]
    torch.testing.assert_close(found[:3], torch.tensor(wanted))


def test_entries_that_all_sites_send_are_their_mean_however_much_silence_counts() -> None:
    x = [noise(i) for i in range(3)]
    torch.testing.assert_close(close(aggregators.SenderMean(silent=0.25), x), close(aggregators.Mean(), x))


def test_silence_that_takes_more_than_square_roots_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"sender_mean: silent = 0\.3; wanted one of 0\.0, 0\.25, 0\.5"):
        aggregators.SenderMean(silent=0.3)


@pytest.mark.parametrize("aggregator", [aggregators.Median(), aggregators.TrimmedMean(1)])
def test_a_lying_site_cannot_move_it_far(aggregator: Aggregator) -> None:
    honest = [noise(i) for i in range(4)]
    lie = torch.full((N,), 1e30)
    found = close(aggregator, [*honest, lie])
    low, high = torch.stack(honest).min(0).values, torch.stack(honest).max(0).values
    assert bool(((found >= low) & (found <= high)).all())
    assert not torch.isclose(close(aggregators.Mean(), [*honest, lie]), found).any()


def test_median_and_trimmed_mean_by_hand() -> None:
    x = [torch.full((N,), v) for v in (1.0, 2.0, 4.0, 100.0)]
    assert close(aggregators.Median(), x)[0] == 3.0
    assert close(aggregators.Median(), x[:3])[0] == 2.0
    assert close(aggregators.TrimmedMean(1), x)[0] == 3.0
    assert close(aggregators.TrimmedMean(0), x)[0] == pytest.approx(26.75)
    assert close(aggregators.TrimmedMean(9), x[:3])[0] == 2.0  # at least one value stays


def outer_against(aggregator: aggregators.Outer, build: type[torch.optim.Optimizer], **options: object) -> None:
    w = torch.nn.Parameter(noise(50))
    mine = w.detach().clone()
    optimizer = build([w], **options)  # type: ignore[arg-type]
    memory = Memory(WHOLE)
    for step in range(7):
        update = noise(60, step)
        w.grad = -update
        optimizer.step()
        moved = combine(aggregator, contributions([whole(update - 1), whole(update + 1)]), memory)
        assert moved is not None
        mine += moved
    torch.testing.assert_close(mine, w.detach(), rtol=1e-4, atol=1e-5)


def test_outer_nesterov_is_torchs() -> None:
    outer_against(aggregators.Outer("nesterov", 0.7, 0.9), torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def test_outer_sgd_is_torchs() -> None:
    outer_against(aggregators.Outer("sgd", 0.5), torch.optim.SGD, lr=0.5)


def test_outer_adam_is_torchs() -> None:
    outer_against(
        aggregators.Outer("adam", 0.1, 0.9, 0.99, 1e-8), torch.optim.Adam, lr=0.1, betas=(0.9, 0.99), eps=1e-8
    )


@pytest.mark.parametrize("rule", ["nesterov", "adam"])
def test_a_fragment_leaves_the_memory_of_the_others_untouched(rule: str) -> None:
    outer, memory, fragment = aggregators.Outer(rule), Memory(WHOLE), Intervals(((30, 36),))
    combine(outer, contributions([whole(noise(1))]), memory)
    before = {name: tensor.clone() for name, tensor in memory.vectors.items()}
    moved = combine(outer, contributions([whole(noise(2)[:6], start=30)]), memory, fragment)
    assert moved is not None
    assert moved.all()
    assert combine(outer, contributions([whole(noise(2)[:6], start=30)]), memory, WHOLE - fragment) is None
    for name, tensor in memory.vectors.items():
        assert torch.equal(tensor[:30], before[name][:30])
        assert torch.equal(tensor[36:], before[name][36:])
        assert not torch.equal(tensor[30:36], before[name][30:36])


CUTS = [
    [Intervals(((0, 64),))],
    [Intervals(((0, 7),)), Intervals(((7, 40),)), Intervals(((40, 64),))],
    [Intervals(((0, 3), (9, 30), (50, 51))), Intervals(((3, 9), (30, 50), (51, 64)))],
]


@pytest.mark.parametrize("cut", CUTS[1:], ids=["stretches", "scattered"])
@pytest.mark.parametrize("aggregator", ALL, ids=str)
def test_a_round_is_the_same_in_any_pieces(aggregator: Aggregator, cut: list[Intervals]) -> None:
    """The pushes are cut otherwise again, and one of them is sparse."""
    whole_memory, memory = Memory(WHOLE), Memory(WHOLE)
    for number in range(3):
        sparse, _ = codecs.parse("topk(0.3)").encode(noise(number, 2), {}, 0)
        scattered = Intervals(((2, 5), (20, 60)))
        parts = Segment.at(scattered, Fp32().encode(at(noise(number, 3), scattered), {}, 0)[0])
        pushes = contributions([whole(noise(number, 1)), (Segment(0, sparse),), (parts,)], [1.0, 0.3, 2.5])
        expected = combine(aggregator, pushes, whole_memory)
        assert expected is not None
        found = torch.zeros(N)
        for intervals in cut:
            moved = combine(aggregator, pushes, memory, intervals)
            assert moved is not None
            Segment.at(intervals, Fp32().encode(moved, {}, 0)[0]).into(found, 0)
        assert torch.equal(found, expected)
    assert memory.vectors.keys() == whole_memory.vectors.keys()
    assert all(torch.equal(memory.vectors[name], vector) for name, vector in whole_memory.vectors.items())


@pytest.mark.parametrize("aggregator", ALL, ids=str)
def test_pushes_are_not_changed(aggregator: Aggregator) -> None:
    pushes = contributions([whole(noise(1)), whole(noise(2))], [1.0, 0.5])
    before = [push.segments[0].payload.body.clone() for push in pushes]
    first = combine(aggregator, pushes)
    second = combine(aggregator, pushes)
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
    assert all(torch.equal(push.segments[0].payload.body, body) for push, body in zip(pushes, before, strict=True))


def test_scratch_does_not_grow_with_the_number_of_pushes() -> None:
    """Each push is decoded into the same memory, but for median and trimmed mean."""
    for aggregator in (aggregators.Mean(), aggregators.Sum(), aggregators.SenderMean(), aggregators.Outer()):
        sizes = []
        for count in (2, 20):
            scratch = Scratch()
            pushes = contributions([whole(noise(i)) for i in range(count)], [0.5] * count)
            aggregator.combine(pushes, WHOLE, 0.5 * count, Memory(WHOLE), scratch)
            sizes.append(scratch.nbytes)
        assert sizes[0] == sizes[1] <= 4 * 4 * N


def test_shares_of_relayed_pushes_add_up_to_the_mean() -> None:
    weights = [1.0, 0.3, 2.5]
    pushes = contributions([whole(noise(i)) for i in range(3)], weights)
    relayed = [RelayedPush(site=p.site, round=p.round, weight=p.weight, segments=p.segments) for p in pushes]
    expected = combine(aggregators.Mean(), pushes)
    assert expected is not None
    at_once = torch.zeros(N)
    for segment, share in relayed_shares(relayed):
        segment.into(at_once, fixed.ADD, WHOLE, share=share)
    torch.testing.assert_close(at_once, expected)
    for intervals in CUTS[2]:
        found = torch.zeros(intervals.numel)
        for segment, share in relayed_shares(relayed):
            segment.into(found, fixed.ADD, intervals, share=share)
        assert torch.equal(found, at(at_once, intervals)), "however the model is cut"
    nothing = [RelayedPush(site="a", round=1, weight=0.0, segments=pushes[0].segments)]
    assert relayed_shares(nothing) == []
    relayed[1] = RelayedPush(site="b", round=4, weight=1.0, segments=None)
    with pytest.raises(ProtocolError, match="leaves out the push of 'b' for round 4"):
        relayed_shares(relayed)


def test_a_limit_holds_also_for_an_entry_that_only_the_limited_site_has_sent() -> None:
    """The mean over senders divides by their weights: by those without the limit, or it would cancel."""

    def push(site: str, values: list[float], **more: float) -> Contribution:
        payload, _ = Fp32().encode(torch.tensor(values), {}, 0)
        return Contribution(site=site, round=1, segments=(Segment(0, payload),), **{"weight": 1.0, **more})

    pushes = [push("a", [1.0, 0.0]), push("b", [10.0, 10.0], weight=0.1, scale=0.1)]
    whole = Intervals.whole(2)
    found = SenderMean(limit=1).combine(pushes, whole, 1.1, Memory(whole), Scratch())
    assert found is not None
    assert found.tolist() == pytest.approx([1.0, 1.0])

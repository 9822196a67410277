"""What the server makes of the pushes of a round."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from weightgrad.codecs import Fp32
from weightgrad.core import aggregators
from weightgrad.core.aggregators import Aggregator, State
from weightgrad.core.selectors import Interval
from weightgrad.wire.messages import Segment

from .harness import LAYOUT, noise

N = LAYOUT.numel


def whole(x: Tensor, start: int = 0) -> tuple[Segment, ...]:
    return (Segment(start, Fp32().encode(x, {}, 0)[0]),)


def close(aggregator: Aggregator, pushes: list[Tensor], weights: list[float] | None = None) -> Tensor:
    round_ = aggregator.open(N)
    for place, push in enumerate(pushes):
        round_.add(f"site-{place}", whole(push), 1.0 if weights is None else weights[place])
    return aggregator.close(round_, {})


def test_mean() -> None:
    x = [noise(i) for i in range(3)]
    torch.testing.assert_close(close(aggregators.Mean(), x), torch.stack(x).mean(0))


def test_mean_by_samples() -> None:
    x = [noise(i) for i in range(2)]
    torch.testing.assert_close(close(aggregators.Mean(), x, [1.0, 3.0]), (x[0] + 3 * x[1]) / 4)


def test_a_site_that_sent_nothing_counts_as_zero_in_the_mean() -> None:
    round_ = aggregators.Mean().open(N)
    round_.add("a", whole(noise(1)))
    round_.add("b", ())
    torch.testing.assert_close(aggregators.Mean().close(round_, {}), noise(1) / 2)


def test_a_round_of_nothing_is_zero() -> None:
    for one in (
        aggregators.Mean(),
        aggregators.SenderMean(),
        aggregators.Sum(),
        aggregators.Median(),
        aggregators.Outer(),
    ):
        round_ = one.open(N)
        round_.add("a", ())
        assert not one.close(round_, {}).any()


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
    memory: State = {}
    for step in range(7):
        update = noise(60, step)
        w.grad = -update
        optimizer.step()
        round_ = aggregator.open(N)
        round_.add("a", whole(update - 1))
        round_.add("b", whole(update + 1))
        mine += aggregator.close(round_, memory)
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
    outer = aggregators.Outer(rule)
    memory: State = {}
    round_ = outer.open(N)
    round_.add("a", whole(noise(1)))
    outer.close(round_, memory)
    before = {name: tensor.clone() for name, tensor in memory.items()}
    round_ = outer.open(N)
    round_.add("a", whole(noise(2)[:6], start=30))
    moved = outer.close(round_, memory)
    assert moved[30:36].all()
    assert not moved[:30].any()
    assert not moved[36:].any()
    for name, tensor in memory.items():
        assert torch.equal(tensor[:30], before[name][:30])
        assert torch.equal(tensor[36:], before[name][36:])
        assert not torch.equal(tensor[30:36], before[name][30:36])


@pytest.mark.parametrize(
    "aggregator", [aggregators.Mean(), aggregators.Sum(), aggregators.SenderMean(), aggregators.Outer()]
)
@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_a_push_is_forgotten_once_it_is_added(aggregator: Aggregator, weight: float) -> None:
    def tensors() -> int:
        gc.collect()
        return sum(type(one) is Tensor for one in gc.get_objects())

    round_ = aggregator.open(N)
    round_.add("a", whole(noise(0)), weight)
    held = tensors()
    for place in range(20):
        round_.add(f"site-{place}", whole(noise(place)), weight)
    assert tensors() == held
    assert round_.each is None


def test_what_was_sent_is_named_in_order_and_uneven_overlaps_are_one_stretch() -> None:
    round_ = aggregators.Mean().open(N)
    round_.add("a", whole(noise(1)[36:60].view(4, 6), start=36))
    round_.add("b", whole(noise(1)[:30].view(6, 5)))
    assert round_.intervals() == [Interval(0, (6, 5)), Interval(36, (4, 6))]
    round_.add("c", whole(noise(1)[:40]))
    assert round_.intervals() == [Interval(0, (60,))]

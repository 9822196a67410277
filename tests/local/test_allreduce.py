"""The allreduce: all ranks get the same, and nothing is lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightgrad import codecs
from weightgrad.errors import NonFiniteError, ProtocolError, StateError, StrategyError
from weightgrad.kernels import derive
from weightgrad.local import QuantizedAllreduce

FEEDBACK = ["ef(qsgd(bits=4))", "ef(topk(0.1))", "ef(sign())", "ef(terngrad())", "ef(codebook(bits=3))"]


def randn(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def group(size: int, numel: int, spec: str) -> list[QuantizedAllreduce]:
    return [QuantizedAllreduce(size, numel, codecs.parse(spec), derive(3, rank)) for rank in range(size)]


def exchange(ranks: list[QuantizedAllreduce], vectors: list[Tensor], step: int) -> list[Tensor]:
    sent = [rank.encode_chunks(vector, step) for rank, vector in zip(ranks, vectors, strict=True)]
    reduced = [rank.reduce([strategy[place] for strategy in sent], step) for place, rank in enumerate(ranks)]
    return [rank.gather(reduced) for rank in ranks]


@settings(deadline=None)
@given(size=st.integers(1, 7), numel=st.integers(0, 100), seed=st.integers(0, 1000))
def test_fp32_is_the_mean_in_the_order_of_the_ranks(size: int, numel: int, seed: int) -> None:
    vectors = [randn(numel, seed + rank) for rank in range(size)]
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total += vector
    for result in exchange(group(size, numel, "fp32()"), vectors, 0):
        assert torch.equal(result, total / size)


@pytest.mark.parametrize(
    "spec", [*FEEDBACK, "qsgd(bits=4)", "terngrad()", "onebit()", "dgc(fraction=0.1, momentum=0.0)"]
)
def test_all_ranks_get_the_same(spec: str) -> None:
    ranks = group(3, 1000, spec)
    for step in range(3):
        results = exchange(ranks, [randn(1000, 10 * step + rank) for rank in range(3)], step)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("spec", FEEDBACK)
def test_results_and_what_is_held_add_up(spec: str) -> None:
    size, numel, steps = 4, 1003, 25
    ranks = group(size, numel, spec)
    wanted, got = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for step in range(steps):
        vectors = [randn(numel, 100 * step + rank) for rank in range(size)]
        wanted += torch.stack(vectors).double().mean(0)
        got += exchange(ranks, vectors, step)[0].double()
    held = torch.zeros(numel, dtype=torch.float64)
    for rank in ranks:
        state = rank.state()
        held += torch.cat([state[f"chunk {place}/residual"] for place in range(size)]).double() / size
    held += torch.cat([rank.state()["mean/residual"] for rank in ranks]).double()
    torch.testing.assert_close(got + held, wanted, rtol=0, atol=1e-4)
    assert float((got - wanted).abs().max()) > 1e-3  # it was lossy


def test_the_mean_has_feedback_even_if_the_codec_has_none() -> None:
    (rank,) = group(1, 64, "topk(0.5)")
    total = torch.zeros(64)
    for step in range(8):
        total += rank.gather([rank.reduce(rank.encode_chunks(randn(64, step), step), step)])
    sent = torch.zeros(64)
    codec = codecs.parse("topk(0.5)")
    for step in range(8):
        sent += codecs.decode(codec.encode(randn(64, step), {}, derive(derive(3, 0), step, 0))[0])
    torch.testing.assert_close(total + rank.state()["mean/residual"], sent)


def test_a_saved_state_continues_the_same() -> None:
    through = group(3, 500, "ef(qsgd(bits=2))")
    for step in range(10):
        exchange(through, [randn(500, 10 * step + rank) for rank in range(3)], step)
    saved = [rank.state() for rank in through]
    wanted = [exchange(through, [randn(500, 10 * step + r) for r in range(3)], step)[0] for step in range(10, 15)]
    again = group(3, 500, "ef(qsgd(bits=2))")
    for rank, state in zip(again, saved, strict=True):
        rank.load(state)
    for step, mean in zip(range(10, 15), wanted, strict=True):
        assert torch.equal(exchange(again, [randn(500, 10 * step + r) for r in range(3)], step)[0], mean)


def test_a_fresh_state_can_be_loaded_and_a_strange_one_not() -> None:
    one, other = group(1, 100, "ef(sign())")[0], group(2, 100, "ef(sign())")[0]
    one.load(one.state())
    with pytest.raises(StateError, match="chunk 1/residual"):
        one.load(other.state())


def test_noise_follows_key_and_step() -> None:
    vector = randn(1000, 0)
    (first,), (chunk,) = group(1, 1000, "qsgd(bits=2)"), codecs.parse("fp32()").encode(vector, {}, 0)[:1]
    means = [rank.gather([rank.reduce([chunk], step)]) for step in (0, 0, 1) for rank in group(1, 1000, "qsgd(bits=2)")]
    sent = [codecs.decode(first.encode_chunks(vector, step)[0]) for step in (0, 0, 1)]
    for same, again, other in (means, sent):
        assert torch.equal(same, again)
        assert not torch.equal(same, other)


@pytest.mark.parametrize("spec", ["fp32()", "qsgd(bits=4)", "onebit()", "adaptive(pi=4)", "topk(0.5)"])
def test_memory_is_used_again_and_nobody_notices(spec: str) -> None:
    fresh, again = group(2, 1001, spec), group(2, 1001, spec)
    room = torch.full((1001,), float("nan"))
    kept: list[tuple[bytes, codecs.Payload]] = []
    for step in range(4):
        vectors = [randn(1001, 10 * step + rank) for rank in range(2)]
        (wanted, _) = exchange(fresh, vectors, step)
        sent = [rank.encode_chunks(vector, step) for rank, vector in zip(again, vectors, strict=True)]
        reduced = [rank.reduce([strategy[place] for strategy in sent], step) for place, rank in enumerate(again)]
        assert again[0].gather(reduced, out=room) is room
        assert torch.equal(room, wanted)
        kept += [(bytes(payload.body.numpy()), payload) for payload in reduced]
    assert all(bytes(payload.body.numpy()) == body for body, payload in kept)  # none of them is in the ranks' rooms
    first, second = (fresh[0].gather([payload for _, payload in kept[:2]]) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize("out", [torch.zeros(10), torch.zeros(11, dtype=torch.float64), torch.zeros(22)[::2]])
def test_a_mean_goes_only_where_it_fits(out: Tensor) -> None:
    rank = group(1, 11, "fp32()")[0]
    payloads = rank.encode_chunks(torch.ones(11), 0)
    with pytest.raises(StrategyError, match="expected contiguous float32 of 11 elements"):
        rank.gather(payloads, out=out)
    assert not out.any()


def test_bytes_are_few() -> None:
    sent = group(4, 40_000, "qsgd(bits=4)")[0].encode_chunks(randn(40_000, 0), 0)
    assert sum(payload.nbytes for payload in sent) < 40_000 * 4 / 7


def test_mistakes_are_named() -> None:
    rank, other = group(2, 11, "fp32()")
    with pytest.raises(StrategyError, match=r"shape \[10\], expected 11"):
        rank.encode_chunks(torch.zeros(10), 0)
    with pytest.raises(NonFiniteError, match="element 3"):
        rank.encode_chunks(torch.tensor([0.0, 0, 0, float("nan"), 0, 0, 0, 0, 0, 0, 0]), 0)
    five, six = rank.encode_chunks(torch.zeros(11), 0)
    with pytest.raises(ProtocolError, match="1 payloads for 2 ranks"):
        rank.reduce([five], 0)
    with pytest.raises(ProtocolError, match="ranks must agree"):
        rank.reduce([five, six], 0)
    with pytest.raises(ProtocolError, match="order of the ranks"):
        rank.gather([six, five])
    rank.reduce([five, five], 0)
    with pytest.raises(ProtocolError, match=r"shape \[6\], expected 5"):
        rank.reduce([six, six], 1)
    with pytest.raises(StrategyError, match="momentum would count twice"):
        group(2, 10, "dgc(fraction=0.5)")
    with pytest.raises(StrategyError, match="there must be a rank"):
        QuantizedAllreduce(0, 10, codecs.parse("fp32()"), 0)
    assert torch.equal(other.gather([five, six]), torch.zeros(11))

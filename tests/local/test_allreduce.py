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


# Whole columns of a matrix


def by_columns(size: int, rows: int, columns: int, spec: str) -> list[QuantizedAllreduce]:
    codec = codecs.parse(spec)
    return [
        QuantizedAllreduce(size, rows * columns, codec, derive(3, rank), matrix=(rows, columns)) for rank in range(size)
    ]


@settings(max_examples=30)
@given(size=st.integers(1, 5), rows=st.integers(1, 9), columns=st.integers(1, 12))
def test_fp32_by_columns_is_the_same_mean(size: int, rows: int, columns: int) -> None:
    vectors = [randn(rows * columns, rank) for rank in range(size)]
    (wanted,) = exchange(group(size, rows * columns, "fp32()"), vectors, 0)[:1]
    for result in exchange(by_columns(size, rows, columns, "fp32()"), vectors, 0):
        assert torch.equal(result, wanted)


def onebit_by_column(matrix: Tensor) -> Tensor:
    """One-bit SGD as it is written down: in each column, each value becomes the mean of those with its sign."""
    out = torch.empty_like(matrix)
    for column in range(matrix.shape[1]):
        values = matrix[:, column]
        for chosen in (values >= 0, values < 0):
            if chosen.any():
                out[chosen, column] = values[chosen].double().mean().float()
    return out


def test_onebit_by_columns_is_drydens_with_a_pair_of_means_a_column() -> None:
    """Three steps against a slow reference, with the error feedback of both ways."""
    size, rows, columns = 3, 16, 10
    ranks = by_columns(size, rows, columns, "onebit()")
    errors, back = torch.zeros(size, rows, columns), torch.zeros(rows, columns)
    for step in range(3):
        vectors = [randn(rows * columns, 10 * step + rank) for rank in range(size)]
        results = exchange(ranks, vectors, step)
        sent = []
        for rank, vector in enumerate(vectors):
            value = vector.view(rows, columns) + errors[rank]
            sent.append(onebit_by_column(value))
            errors[rank] = value - sent[-1]
        value = torch.stack(sent).mean(0) + back
        wanted = onebit_by_column(value)
        back = value - wanted
        for result in results:
            torch.testing.assert_close(result.view(rows, columns), wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(results[0], exchange(group(size, rows * columns, "onebit()"), vectors, 2)[0], atol=1e-2)


def test_columns_cost_a_pair_of_means_each() -> None:
    rows, columns = 256, 64
    flat, dealt = group(4, rows * columns, "onebit()")[0], by_columns(4, rows, columns, "onebit()")[0]
    vector = randn(rows * columns, 0)
    sizes = [sum(p.body.numel() for p in rank.encode_chunks(vector, 0)) for rank in (flat, dealt)]
    assert sizes == [rows * columns // 8 + 4 * 8, rows * columns // 8 + columns * 8]


def test_columns_of_different_sizes_are_a_smaller_error() -> None:
    """What the pairs of means are for: columns of a gradient differ in size."""
    rows, columns = 128, 24
    scale = torch.logspace(-2, 1, columns)
    vectors = [(randn(rows * columns, rank).view(rows, columns) * scale).view(-1) for rank in range(2)]
    mean = (vectors[0] + vectors[1]) / 2
    off = [
        float((exchange(ranks, vectors, 0)[0] - mean).norm() / mean.norm())
        for ranks in (by_columns(2, rows, columns, "onebit()"), group(2, rows * columns, "onebit()"))
    ]
    assert off[0] < 0.9 * off[1]


@pytest.mark.parametrize("spec", ["onebit()", "ef(qsgd(bits=4))", "adaptive(pi=4)"])
def test_a_saved_state_of_columns_continues_the_same(spec: str) -> None:
    through, again = (by_columns(2, 20, 7, spec) for _ in range(2))
    for step in range(3):
        exchange(through, [randn(140, 10 * step + rank) for rank in range(2)], step)
    for old, new in zip(through, again, strict=True):
        new.load(old.state())
    vectors = [randn(140, 90 + rank) for rank in range(2)]
    assert torch.equal(exchange(through, vectors, 3)[0], exchange(again, vectors, 3)[1])


def test_a_matrix_has_as_many_elements_as_the_vector() -> None:
    for wrong in ((3, 3), (0, 10), (-2, -5)):
        with pytest.raises(StrategyError, match="rows and columns"):
            QuantizedAllreduce(2, 10, codecs.parse("fp32()"), 0, matrix=wrong)
    rank, _ = by_columns(2, 2, 5, "fp32()")
    two, three = rank.encode_chunks(torch.zeros(10), 0)
    with pytest.raises(ProtocolError, match=r"shape \[2, 3\], expected \[2, 2\]"):
        rank.gather([three, two])


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

"""A local model's reference with pushes in flight: one pass in C gives the floats of one pass for each term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from weightgrad import codecs
from weightgrad.codecs.payload import Payload
from weightgrad.codecs.sparse_entries import SparseEntries, check_streams
from weightgrad.errors import DecodeError
from weightgrad.kernels import local_model, native
from weightgrad.kernels.local_model import AddedEntries

N = 10_007  # several stretches of the kernel, and no multiple of any vector
CUTS = (0, 1, 2050, 2051, 7000, N)


def normal(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def push(spec: str, first: int, numel: int, seed: int) -> tuple[Payload, AddedEntries]:
    payload, _ = codecs.parse(spec).encode(normal(numel, seed), {}, seed)
    return payload, SparseEntries.of(payload).added(first, 0.7, f"test {seed}")


def parts_of(vector: Tensor) -> list[tuple[int, Tensor]]:
    return [(first, vector[first:last].clone()) for first, last in pairwise(CUTS)]


def joined(parts: Sequence[tuple[int, Tensor]]) -> Tensor:
    return torch.cat([own for _, own in parts])


SPECS = {
    "none": (),
    "signs": (("topk(0.01) > sign()", 0, N), ("topk(0.3) > sign()", 0, N)),
    "values": (("topk(0.05) > codebook(bits=2)", 0, N), ("topk(0.01)", 0, N), ("topk(0.5) > qsgd(bits=4)", 0, N)),
    "within": (("topk(0.02) > sign()", 3000, 5000), ("topk(1.0)", 17, 1)),
}


@pytest.mark.parametrize("backend", ["native", "portable"])
@pytest.mark.parametrize("left", [True, False], ids=["residual", "nothing left"])
@pytest.mark.parametrize("pushes", list(SPECS))
def test_one_pass_gives_the_floats_of_many(pushes: str, left: bool, backend: str) -> None:
    local, weights = normal(N, 1), normal(N, 2)
    residual = normal(N, 3) if left else None
    made = [push(*spec, seed) for seed, spec in enumerate(SPECS[pushes], 10)]
    reference = weights + residual * 0.3 if residual is not None else weights.clone()
    for (payload, entries), (_, first, numel) in zip(made, SPECS[pushes], strict=True):
        reference[first : first + numel] += codecs.decode(payload) * entries.share
    added = [entries for _, entries in made]
    for forced in (backend, "reference"):
        with native.use(forced):
            parts, out = parts_of(local), torch.full((N,), 9.0)
            assert local_model.distance(parts, weights, residual, 0.3, added, out)
            assert torch.equal(out, local - reference)
            assert torch.equal(joined(parts), local)
            assert local_model.place(parts, weights, residual, 0.3, added)
            assert torch.equal(joined(parts), reference)


@pytest.mark.parametrize("share", [0.3, 0.0])
@pytest.mark.parametrize("pushes", list(SPECS))
def test_a_push_in_one_pass_gives_the_floats_of_many(pushes: str, share: float) -> None:
    local, weights, residual = normal(N, 1), normal(N, 2), normal(N, 3)
    shared = residual if share else None
    before = [push(*spec, seed)[1] for seed, spec in enumerate(SPECS[pushes], 10)]
    after = [replace(one, share=0.4) for one in before]
    sent = push("topk(0.02) > sign()", 0, N, 30)[1]
    for forced in ("native", "portable", "reference"):
        with native.use(forced):
            fresh = torch.empty(N)
            assert local_model.distance(parts_of(local), weights, shared, share, before, fresh)
            kept, parts = residual.clone(), parts_of(local)
            assert local_model.take_update(parts, weights, kept, share, before, None) == N
            assert torch.equal(kept, residual + fresh)
            assert torch.equal(joined(parts), local)
            kept = residual.clone()
            assert local_model.take_update(parts, weights, kept, share, before, after) == N
            assert torch.equal(kept, residual + fresh)
            wanted = parts_of(local)
            assert local_model.place(wanted, weights, kept if share else None, share, after)
            assert torch.equal(joined(parts), joined(wanted))
            assert sent.add(kept)  # what leaves changes the residual at its entries only
            assert local_model.place_entries(parts, weights, kept if share else None, share, [*after, sent])
            assert local_model.place(wanted, weights, kept if share else None, share, [*after, sent])
            assert torch.equal(joined(parts), joined(wanted))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_update_that_is_not_finite_stops_before_it(bad: float) -> None:
    weights = normal(N, 2)
    for forced in ("native", "portable", "reference"):
        with native.use(forced):
            local, residual = normal(N, 1), normal(N, 3)
            local[7500] = bad
            parts, kept = parts_of(local), residual.clone()
            done = local_model.take_update(parts, weights, kept, 0.0, [], [])
            assert done is not None
            assert done <= 7500 < done + local_model.STRETCH
            assert torch.equal(kept[:done], residual[:done] + (local - weights)[:done])
            assert torch.equal(kept[done:], residual[done:])
            assert torch.equal(joined(parts)[done:].nan_to_num(), local[done:].nan_to_num())


def test_more_pushes_than_the_kernel_takes() -> None:
    weights = normal(100, 1)
    added = [push("topk(0.5)", 0, 100, seed)[1] for seed in range(local_model.MOST_PUSHES + 3)]
    whole, parts = weights.clone(), [(0, torch.zeros(100))]
    assert local_model.place(parts, weights, None, 0.0, added)
    for one in added:
        assert one.add(whole)
    assert torch.equal(parts[0][1], whole)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_bad_indices_write_nothing(backend: str) -> None:
    payload, good = push("topk(0.1)", 0, N, 1)
    payload.body[:64] = 255
    bad = SparseEntries.of(payload).added(0, 1.0, "test bad")
    weights, parts = normal(N, 2), parts_of(normal(N, 3))
    before = joined(parts)
    with native.use(backend):
        assert not local_model.place(parts, weights, None, 0.0, [bad])
        residual = normal(N, 4)
        assert local_model.take_update(parts, weights, residual, 0.5, [bad], [good]) is None
        assert local_model.take_update(parts, weights, residual, 0.5, [good], [bad]) is None
        assert torch.equal(residual, normal(N, 4))
        assert not local_model.place_entries(parts, weights, None, 0.0, [good, bad])
        assert torch.equal(joined(parts), before)
        with pytest.raises(DecodeError, match="ascending indices"):
            check_streams(False, [bad])
    check_streams(True, [good])

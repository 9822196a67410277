"""Signs that two sites sent, counted by the class and one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightgrad import codecs
from weightgrad.codecs import Fp32, pack_entries, unpack_entries
from weightgrad.codecs.sign import Sign
from weightgrad.core.controller import agreement
from weightgrad.core.controller.agreement import Agreement, Signs
from weightgrad.wire.messages import Segment

NUMEL = 40
pushes = st.lists(
    st.dictionaries(st.integers(0, NUMEL - 1), st.sampled_from([-2.0, -0.5, 0.0, 1.0, 3.0]), min_size=1), max_size=10
)


def segment(entries: dict[int, float], numel: int = NUMEL, start: int = 0) -> Segment:
    at = torch.tensor(sorted(entries), dtype=torch.int64)
    values = torch.tensor([entries[int(i)] for i in at])
    return Segment(start, pack_entries(at, values, torch.zeros(numel), Fp32(), 1)[0])


def one_by_one(sites: list[dict[int, float]]) -> Signs:
    common = same = 0
    for a, b in itertools.combinations(sites, 2):
        both = [(a[i], b[i]) for i in a.keys() & b.keys() if a[i] and b[i]]
        common += len(both)
        same += sum((x > 0) == (y > 0) for x, y in both)
    return Signs(common, same)


@given(pushes)
def test_pairs_of_sites_are_counted(sites: list[dict[int, float]]) -> None:
    found = Agreement(NUMEL)
    for site in sites:
        found.add((segment(site),))
    assert found.signs() == one_by_one(sites[: agreement._MAX_SITES])


def test_parts_lie_where_they_start() -> None:
    found = Agreement(3 * NUMEL)
    found.add((segment({0: 1.0}), segment({2: 1.0}, start=NUMEL)))
    found.add((segment({0: 1.0}, start=NUMEL), segment({0: 1.0}, start=2 * NUMEL)))
    found.add((segment({2: -1.0}, start=NUMEL),))
    assert found.signs() == Signs(1, 0), "only element 42 was sent twice, with different signs"


def test_a_site_counts_once_however_many_parts_its_push_has() -> None:
    found = Agreement(20 * NUMEL)
    for _ in range(2):
        found.add(tuple(segment({1: 1.0}, start=NUMEL * i) for i in range(20)))
    assert found.signs() == Signs(20, 20)


def test_what_is_dense_or_nothing_says_nothing() -> None:
    found = Agreement(NUMEL)
    found.add((Segment(0, Fp32().encode(torch.ones(NUMEL), {}, 0)[0]),))
    found.add(())
    found.add((segment({1: 1.0}),))
    assert found.signs() == Signs(0, 0)


def test_of_a_large_model_the_same_share_of_every_site_is_looked_at() -> None:
    numel = 64 * agreement._COMPARE_ALL_BELOW
    generator = np.random.default_rng(3)
    at = np.sort(generator.choice(numel, 200_000, replace=False))
    signs = generator.choice([-1.0, 1.0], at.size)
    flipped = np.where(generator.random(at.size) < 0.25, -signs, signs)
    found = Agreement(numel)
    for own in (signs, flipped):
        values = torch.from_numpy(own).float()
        like = torch.zeros(1).expand(numel)
        found.add((Segment(0, pack_entries(torch.from_numpy(at), values, like, Sign(), 1)[0]),))
    common, same = found.signs()
    assert common == pytest.approx(at.size / 64, rel=0.1)
    assert same / common == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize("spec", ["topk(0.2)", "topk(0.2) > sign()", "threshold(1.0) > qsgd(bits=4)"])
def test_entries_of_a_payload_are_what_it_decodes_to(spec: str) -> None:
    x: Tensor = torch.randn(500, generator=torch.Generator().manual_seed(1))
    codec = codecs.parse(spec)
    payload, _ = codec.encode(x, codec.init(x), 5)
    indices, values = unpack_entries(payload)
    dense = torch.zeros(500)
    dense[indices] = values
    assert torch.equal(dense, codecs.decode(payload))

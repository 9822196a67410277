"""Every sample is in exactly one shard, whatever the sharding, and no worker is without."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightgrad.errors import DataError
from weightgrad.lab.data import shards
from weightgrad.lab.data.shards import Dirichlet, Shards

WORKERS = st.lists(st.integers(1, 5), min_size=1, max_size=8)
HOW = st.one_of(st.just("iid"), st.floats(0.01, 100).map(Dirichlet))


def whole(made: Shards, workers: list[int], samples: int) -> None:
    assert [len(site) for site in made] == workers
    every = torch.cat([worker for site in made for worker in site])
    assert torch.equal(every.sort().values, torch.arange(samples))
    assert all(len(worker) for site in made for worker in site)


@given(workers=WORKERS, extra=st.integers(0, 200), classes=st.integers(1, 10), how=HOW, seed=st.integers(0, 2**40))
@settings(max_examples=60)
def test_exactly_one_shard(workers: list[int], extra: int, classes: int, how: object, seed: int) -> None:
    samples = sum(workers) + extra
    labels = torch.randint(classes, (samples,), generator=torch.Generator().manual_seed(seed))
    made = shards.shard(labels, workers, how, seed)  # type: ignore[arg-type]
    whole(made, workers, samples)
    again = shards.shard(labels, workers, how, seed)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for x, y in zip(made, again, strict=True) for a, b in zip(x, y, strict=True))


@given(workers=WORKERS, seed=st.integers(0, 2**40))
@settings(max_examples=30)
def test_folders(workers: list[int], seed: int) -> None:
    ids = torch.repeat_interleave(torch.arange(len(workers)), 7)
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]
    made = shards.by_site(ids, workers, seed)
    whole(made, workers, len(ids))
    for site, mine in enumerate(made):
        assert set(ids[torch.cat(mine)].tolist()) == {site}


def test_iid_shards_are_alike_and_follow_the_seed() -> None:
    labels = torch.arange(1003) % 10
    made = shards.shard(labels, [4, 2], "iid", 0)
    assert {len(worker) for site in made for worker in site} == {167, 168}
    other = shards.shard(labels, [4, 2], "iid", 1)
    assert not torch.equal(made[0][0], other[0][0])
    assert labels[torch.cat(made[0])].bincount().min() > 40


def classes_for_half(labels: torch.Tensor, made: Shards) -> float:
    """How many classes a site needs, on the average, to have half of its samples."""
    needed = []
    for site in made:
        counts = labels[torch.cat(site)].bincount(minlength=10).sort(descending=True).values
        needed.append(int((counts.cumsum(0) * 2 < counts.sum()).sum()) + 1)
    return sum(needed) / len(needed)


def test_a_small_alpha_is_a_strong_skew() -> None:
    labels = torch.arange(10_000) % 10
    skew = [classes_for_half(labels, shards.shard(labels, [2] * 6, Dirichlet(a), 0)) for a in (0.05, 0.5, 1000.0)]
    assert skew[0] < skew[1] < skew[2]
    assert skew[0] < 2
    assert skew[2] == 5


def test_larger_sites_get_more() -> None:
    labels = torch.arange(10_000) % 10
    made = shards.shard(labels, [1, 9], Dirichlet(50.0), 0)
    assert len(torch.cat(made[0])) == pytest.approx(1000, rel=0.3)


def test_workers_of_a_site_share_alike() -> None:
    labels = torch.arange(10_000) % 10
    for site in shards.shard(labels, [4, 4], Dirichlet(0.3), 0):
        sizes = [len(worker) for worker in site]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("how", ["iid", Dirichlet(0.1)])
def test_too_few_samples(how: object) -> None:
    with pytest.raises(DataError, match="5 samples are too few for 6 workers"):
        shards.shard(torch.arange(5), [3, 3], how, 0)  # type: ignore[arg-type]


def test_mistakes_are_named() -> None:
    with pytest.raises(DataError, match="above 0"):
        Dirichlet(0.0)
    with pytest.raises(DataError, match="no sharding 'even'"):
        shards.shard(torch.arange(9), [1], "even", 0)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="at least one"):
        shards.shard(torch.arange(9), [1, 0], "iid", 0)
    with pytest.raises(DataError, match="site 1 has 1 samples for 2 workers"):
        shards.by_site(torch.tensor([0, 0, 1]), [1, 2], 0)
    with pytest.raises(DataError, match="the data has 3 sites, the recipe 2"):
        shards.by_site(torch.tensor([0, 2, 1]), [1, 1], 0)

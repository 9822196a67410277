"""Shards of the training data: every sample is in exactly one worker's shard.

`iid`: the samples are shuffled and divided among all workers. `Dirichlet(alpha)`: sites differ in their labels; the
shares of each class are drawn from a Dirichlet distribution (Hsu et al., 2019) whose mean is a site's share of the
workers; the smaller alpha, the fewer classes a site has. Inside a site the workers share equally. A site that drew
fewer samples than it has workers gets some from the largest site.

`Batches` says which samples of its shard a worker uses at a step: epochs without replacement, as a pure function of
key and step. Position p = step · batch + i of a worker's stream is entry p mod n of the permutation of epoch p div n,
so any step can be asked for at any time: after a restart, on another machine, or twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from weightgrad.core.random_streams import ShardStream
from weightgrad.errors import DataError
from weightgrad.kernels.noise import derive

Shards = list[list[Tensor]]  # site, worker: indices (n,) int64


@dataclass(frozen=True)
class Dirichlet:
    """Label skew between sites; `alpha` is above 0: 0.1 is strong skew, 100 hardly any."""

    alpha: float

    def __post_init__(self) -> None:
        if not 0 < self.alpha < float("inf"):
            raise DataError(f"dirichlet {self.alpha} is not a concentration; give a number above 0, such as 0.5")


def shard(labels: Tensor, workers: Sequence[int], how: Literal["iid"] | Dirichlet, seed: int) -> Shards:
    """Divide samples among the workers of all sites.

    Args:
        labels: The label of each sample.
        workers: The number of workers of each site.
        how: "iid", or the label skew between sites.
        seed: Decides the division.

    Returns:
        For each site and worker, the indices of its samples.

    Raises:
        DataError: There are too few samples.
    """
    _enough(len(labels), workers)
    if how == "iid":
        order = _shuffled(torch.arange(len(labels)), derive(seed, ShardStream.SHUFFLE))
        pieces = iter(order.tensor_split(sum(workers)))
        return [[next(pieces) for _ in range(count)] for count in workers]
    if not isinstance(how, Dirichlet):
        raise DataError(f"no sharding {how!r}; there are iid, folders and dirichlet")
    sites = _fill(_skewed(labels, workers, how.alpha, seed), workers)
    return _within(sites, workers, seed)


def by_site(site_ids: Tensor, workers: Sequence[int], seed: int) -> Shards:
    """Divide samples by their site: site i has the samples whose id is i.

    Raises:
        DataError: A site has too few samples, or the recipe does not have it.
    """
    if len(site_ids) and int(site_ids.max()) >= len(workers):
        raise DataError(f"the data has {int(site_ids.max()) + 1} sites, the recipe {len(workers)}; name them alike")
    sites = [torch.nonzero(site_ids == i).flatten() for i in range(len(workers))]
    for i, (mine, count) in enumerate(zip(sites, workers, strict=True)):
        if len(mine) < count:
            raise DataError(f"site {i} has {len(mine)} samples for {count} workers; give it more, or fewer workers")
    return _within(sites, workers, seed)


def _enough(samples: int, workers: Sequence[int]) -> None:
    if not workers or min(workers) < 1:
        raise DataError(f"workers of the sites are {list(workers)}; every site needs at least one")
    if samples < sum(workers):
        raise DataError(f"{samples} samples are too few for {sum(workers)} workers; use more data or fewer workers")


def _shuffled(indices: Tensor, key: int) -> Tensor:
    return indices[torch.randperm(len(indices), generator=torch.Generator().manual_seed(key))]


def _skewed(labels: Tensor, workers: Sequence[int], alpha: float, seed: int) -> list[Tensor]:
    weights = np.array(workers) / sum(workers) * len(workers) * alpha
    parts: list[list[Tensor]] = [[] for _ in workers]
    for label in labels.unique().tolist():
        mine = _shuffled(torch.nonzero(labels == label).flatten(), derive(seed, ShardStream.CLASS_ORDER, label))
        shares = np.random.default_rng(derive(seed, ShardStream.CLASS_SHARES, label)).dirichlet(weights)
        cuts = np.floor(np.cumsum(shares)[:-1] * len(mine) + 0.5).astype(int).clip(0, len(mine))
        for part, piece in zip(parts, mine.tensor_split(cuts.tolist()), strict=True):
            part.append(piece)
    return [torch.cat(part) for part in parts]


def _fill(sites: list[Tensor], workers: Sequence[int]) -> list[Tensor]:
    spare = [len(mine) - count for mine, count in zip(sites, workers, strict=True)]
    for poor in range(len(sites)):
        while spare[poor] < 0:
            rich = max(range(len(sites)), key=spare.__getitem__)
            n = min(-spare[poor], max(1, spare[rich] // 2))
            sites[poor] = torch.cat([sites[poor], sites[rich][-n:]])
            sites[rich] = sites[rich][:-n]
            spare[poor] += n
            spare[rich] -= n
    return sites


def _within(sites: list[Tensor], workers: Sequence[int], seed: int) -> Shards:
    keys = [derive(seed, ShardStream.WORKERS, site) for site in range(len(sites))]
    dealt = zip(sites, workers, keys, strict=True)
    return [list(_shuffled(mine, key).tensor_split(count)) for mine, count, key in dealt]


class Batches:
    """The batches of a worker. A batch that is larger than the shard has some samples more than once."""

    def __init__(self, indices: Tensor, batch: int, key: int) -> None:
        if not len(indices):
            raise DataError("a shard without samples gives no batches; use more data or fewer workers")
        if batch < 1:
            raise DataError(f"a batch of {batch} samples for each worker; wanted at least 1")
        self._indices = indices
        self._batch = batch
        self._key = key
        self._epoch = -1
        self._order = indices

    def at(self, step: int) -> Tensor:
        """Indices (batch,) of the samples of a step; steps count from 0."""
        start, stop, n = step * self._batch, (step + 1) * self._batch, len(self._indices)
        parts = []
        for epoch in range(start // n, (stop - 1) // n + 1):
            order = self._shuffled(epoch)
            parts.append(order[max(start - epoch * n, 0) : min(stop - epoch * n, n)])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _shuffled(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive(self._key, epoch))
            self._order = self._indices[torch.randperm(len(self._indices), generator=generator)]
            self._epoch = epoch
        return self._order

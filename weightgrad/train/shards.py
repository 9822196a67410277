"""Who trains on what: every sample in exactly one worker's shard.

`iid`: a shuffled deck dealt to all workers. `Dirichlet(alpha)`: sites differ in their labels; of each class,
sites get shares drawn from a Dirichlet distribution (Hsu et al., 2019) whose mean is their share of the
workers; the smaller alpha, the fewer classes a site sees. Inside a site the workers share alike. A site that
drew fewer samples than it has workers is given some of the largest site's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from weightgrad.errors import DataError
from weightgrad.kernels.noise import derive

Shards = list[list[Tensor]]  # site, worker: indices (n,) int64


@dataclass(frozen=True)
class Dirichlet:
    """Label skew between sites; `alpha` in (0, ∞), 0.1 is strong, 100 is hardly any."""

    alpha: float

    def __post_init__(self) -> None:
        if not 0 < self.alpha < float("inf"):
            raise DataError(f"dirichlet {self.alpha} is not a concentration; give a number above 0, such as 0.5")


def shard(labels: Tensor, workers: Sequence[int], how: Literal["iid"] | Dirichlet, seed: int) -> Shards:
    """Indices of the samples of every site's workers; `workers` says how many each site has."""
    _enough(len(labels), workers)
    if how == "iid":
        deck = _shuffled(torch.arange(len(labels)), derive(seed, 0))
        dealt = iter(deck.tensor_split(sum(workers)))
        return [[next(dealt) for _ in range(count)] for count in workers]
    if not isinstance(how, Dirichlet):
        raise DataError(f"no sharding {how!r}; there are iid, folders and dirichlet")
    sites = _fill(_skewed(labels, workers, how.alpha, seed), workers)
    return _within(sites, workers, seed)


def by_site(site_ids: Tensor, workers: Sequence[int], seed: int) -> Shards:
    """Shards that follow the user's folders: site i has the samples whose id is i."""
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
        mine = _shuffled(torch.nonzero(labels == label).flatten(), derive(seed, 1, label))
        shares = np.random.default_rng(derive(seed, 2, label)).dirichlet(weights)
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
    pairs = zip(sites, workers, strict=True)
    return [list(_shuffled(mine, derive(seed, 3, i)).tensor_split(count)) for i, (mine, count) in enumerate(pairs)]

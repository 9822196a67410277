"""Which samples a worker uses at a step: epochs without replacement, as a pure function of key and step.

Position p = step · batch + i of a worker's stream is entry p mod n of the permutation of epoch p div n, so
any step can be asked for at any time: after a restart, on another machine, or twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weightgrad.errors import DataError
from weightgrad.kernels.noise import derive


class Batches:
    """The stream of a shard. A batch may be larger than the shard: it then has samples more than once."""

    def __init__(self, indices: Tensor, batch: int, key: int) -> None:
        if not len(indices):
            raise DataError("a shard without samples gives no batches; use more data or fewer workers")
        if batch < 1:
            raise DataError(f"a batch of {batch} samples; give at least one a worker")
        self._indices = indices
        self._batch = batch
        self._key = key
        self._epoch = -1
        self._order = indices

    def at(self, step: int) -> Tensor:
        """Indices (batch,) of the samples of a step, counted from 0."""
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

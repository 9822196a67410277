"""Memory that a simulated site has only while it computes a step.

One process plays all sites, and one site computes at a time. The gradient of a local server is filled and used within a
step; so between steps the memory of a large one is given back, and all sites together need it once. Small ones keep
it: they would win nothing, and fresh pages cost time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from weightgrad.lab.sim.site import SimSite

LARGE_BYTES = 2**28
"""From how many bytes on memory is given back and shared; tests lower it."""


class StepMemory:
    """Gives sites the memory of their gradients for a step.

    Args:
        sites: The sites, none of which is computing.
    """

    def __init__(self, sites: Sequence[SimSite]) -> None:
        self._memory: dict[int, tuple[torch.UntypedStorage, int]] = {}
        for site in sites:
            if site.local is not None and site.local.gradient.nbytes >= LARGE_BYTES:
                storage = site.local.gradient.untyped_storage()
                self._memory[site.number] = (storage, storage.nbytes())
                storage.resize_(0)

    @contextmanager
    def during_step(self, site: SimSite) -> Iterator[None]:
        """Give a site its memory; what is in it does not matter, because a step begins by filling it."""
        if site.number not in self._memory:
            yield
            return
        storage, nbytes = self._memory[site.number]
        storage.resize_(nbytes)
        try:
            yield
        finally:
            storage.resize_(0)

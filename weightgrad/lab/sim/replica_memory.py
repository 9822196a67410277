"""One copy of a large global model for all simulated replicas that are at the same version.

Replicas at the same version have the same bits, so in one process one copy is enough. A site that shares updates and
has reached the server's version reads the server's vector. Whoever moves next takes a copy first: a site one of its
own, the server one for all sites that it leaves behind. Nothing is skipped: every site still applies every result, to
its own copy, and borrows again if it then has the server's version and bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightgrad.core.server.state import ServerState
from weightgrad.core.site.update_shard import UpdateShard
from weightgrad.lab.sim import step_memory
from weightgrad.lab.sim.site import SimSite


class ReplicaMemory:
    """Lets sites borrow the server's vector.

    Args:
        server: The server, whose model is in one process.
        sites: The sites, at the server's version.
    """

    def __init__(self, server: ServerState, sites: Sequence[SimSite]) -> None:
        self._model = server.global_model
        self._shards: dict[int, UpdateShard] = {}
        if self._model.vector.nbytes < step_memory.LARGE_BYTES or len(server.shards) > 1:
            return
        for site in sites:
            (first, *others) = site.state.shards
            if isinstance(first, UpdateShard) and not others:
                self._shards[site.number] = first
        self._model.before_move = self._leave_a_copy
        for site in sites:
            self.borrow(site)

    def borrow(self, site: SimSite) -> None:
        """Let a site read the server's vector, if it is at its version and has the same bits."""
        shard = self._shards.get(site.number)
        if shard is None or shard.borrows or site.state.version != self._model.version:
            return
        if torch.equal(shard.global_model.view(torch.int32), self._model.vector.view(torch.int32)):
            shard.global_model, shard.borrows = self._model.vector, True

    def _leave_a_copy(self) -> None:
        """The server moves: the sites that read its vector get a copy, one for all of them."""
        left = [shard for shard in self._shards.values() if shard.global_model is self._model.vector]
        if left:
            copy = self._model.vector.clone()
            for shard in left:
                shard.global_model = copy

"""The end of a site: its module becomes the global model, and the server is given what its final file needs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from weightgrad.core.random_streams import RunStream
from weightgrad.core.site.coordinator import SiteCoordinator
from weightgrad.core.site.update_shard import UpdateShard
from weightgrad.event_log import EventLog
from weightgrad.kernels.noise import derive
from weightgrad.local.weight_encoder import decode_flat
from weightgrad.runtime.checkpoints.final_state import SiteFinalState, all_buffers
from weightgrad.runtime.model.trained_model import TrainedModel
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.site.rank_connection import RankConnection
from weightgrad.runtime.site.rank_step import RankStep
from weightgrad.runtime.site.rank_work import RankWork
from weightgrad.wire.intervals import Intervals


class SiteDeparture:
    """What every rank does when its site has finished training.

    Args:
        work: This rank's part of the rounds.
        group: The ranks of the site.
        connection: This rank's connections to the global server.
        model: What was trained.
        rank_step: What happened around the optimizer's steps.
    """

    def __init__(
        self, work: RankWork, group: SiteGroup, connection: RankConnection, model: TrainedModel, rank_step: RankStep
    ) -> None:
        self._work, self._group, self._connection, self._model = work, group, connection, model
        self._rank_step = rank_step

    def show_global_model(self) -> None:
        """Give the module the global model."""
        shard, weights = self._work.shard, self._model.weights
        if isinstance(shard, UpdateShard):
            self._rank_step.for_rounds()
            weights.begin()
            weights.write(shard.held, shard.global_model)
            self._work.share.share()
            weights.end(changed=True)
        elif self._work.replica is not None:
            self._work.replica.settle()
        self._work.buffers.average()

    def hand_over(self, seed: int, coordinator: SiteCoordinator | None) -> None:
        """Give the module the weights by which the strategy is judged, and the server what its final file needs.

        After the checkpoint, which has the weights of full precision.

        Args:
            seed: The seed of the run.
            coordinator: The site's coordinator, on rank 0.
        """
        layout, weights = self._model.layout, self._model.weights
        version = self._group.maximum(coordinator.version if coordinator is not None else 0)
        payloads = self._rank_step.quantized(derive(seed, RunStream.EVALUATION, version))
        buffers = all_buffers(self._model.module, self._group, stages=self._model.stages)
        if payloads is not None:
            weights.begin()
            weights.write(Intervals.whole(layout.numel), decode_flat(layout, payloads))
            weights.end(changed=True)
        weighed = self._model.at_sites
        if coordinator is None or (payloads is None and not buffers and not weighed):
            return
        state = SiteFinalState.of(layout, payloads, buffers, version=version, samples=coordinator.samples)
        if weighed:
            state = replace(state, quantized=self._weights())
        parts = state.parts(coordinator.name)
        for part in parts:
            self._connection.send_control(part)
        self._connection.wait_sent(sum(len(part.data) for part in parts))

    def _weights(self) -> dict[str, Tensor]:
        """All weights of this rank, by name."""
        layout, weights = self._model.layout, self._model.weights
        weights.begin()
        flat = weights.read(Intervals.whole(layout.numel), torch.empty(layout.numel, dtype=torch.float32))
        found = {slot.name: slot.of(flat).clone() for slot in layout.slots}
        weights.end(changed=False)
        return found

    def write(self, events: EventLog | None, site: str, waited: float) -> None:
        """Write how the site has done, all ranks together, and close the event log; called on every rank.

        Args:
            events: The site's event log, on the rank that has one.
            site: The name of the site.
            waited: Seconds that training has waited for the global server.
        """
        sockets = self._connection.socket_bytes()
        own = [self._connection.up_bytes, self._connection.down_bytes, self._group.sent_bytes]
        own += [0, 0, 0] if sockets is None else [1, sockets["sent"], sockets["received"]]
        up, down, lan, counted, sent, received = (int(total) for total in self._group.sums(own))
        if events is None:
            return
        events.write(
            "site",
            self._connection.now,
            site=site,
            steps=self._work.steps,
            waiting_seconds=waited,
            up_bytes=up,
            down_bytes=down,
            lan_bytes=lan,
            socket_bytes={"sent": sent, "received": received} if counted else None,
        )
        events.close()

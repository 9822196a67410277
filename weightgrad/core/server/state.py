"""The global server in one process: its coordinator and its shards, behind one interface.

Messages and the time go in, messages and the next deadline come out. The simulator and the tests drive the server
through this class; the deployment's processes (`runtime/server/global_server.py`) have the same coordinator and shards.

A checkpoint taken after a round has closed is all the durable state there is: sites send the pushes of open rounds
again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from weightgrad.codecs import Codec
from weightgrad.core.controller.gradient_controller import GradientController
from weightgrad.core.controller.update_controller import Controller
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.local_model import scatter
from weightgrad.core.server.coordinator import ServerCoordinator
from weightgrad.core.server.guard import Guard
from weightgrad.core.server.membership import Members
from weightgrad.core.server.open_round import ClosedRound
from weightgrad.core.server.operation import Operation
from weightgrad.core.server.outbox import Decisions, Download, Outbox
from weightgrad.core.server.push_facts import facts_of_all
from weightgrad.core.server.result_log import MemoryResultLog, ResultLog
from weightgrad.core.server.shard import ServerShard, values_bytes
from weightgrad.core.server.strategy import ServerStrategy
from weightgrad.core.vector_checks import with_prefix, without_prefix
from weightgrad.errors import ProtocolError
from weightgrad.kernels.moments import moments
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_parts import join_result, of_holder, without_values
from weightgrad.wire.message_sizes import nbytes
from weightgrad.wire.messages import Join, JoinReply, Leave, Message, Push, ServerRestarted

__all__ = ["ClosedRound", "Outbox", "ServerState", "ServerStrategy"]


class ServerState:
    """The state of the global server, for all sites.

    Memory: what `ServerShard` says.

    Args:
        global_model: the server's replica of the global model, which the state owns from now on.
        plan: the server's parts of the strategy.
        key: the key of the random streams of the server's codecs.
        guard: checks every push; a push that it refuses counts as empty, and its round closes all the same.
        make_log: makes the log that keeps the last results for sites that were away, for a shard of so many elements.
        parts: what each process has of the global model, if the server has several; `global_model` then shows them as
            one, at the cost of a copy.
    """

    def __init__(
        self,
        global_model: GlobalModel,
        plan: ServerStrategy,
        key: int,
        guard: Guard | None = None,
        make_log: Callable[[int], ResultLog] = lambda numel: MemoryResultLog(4 * numel),
        parts: Sequence[GlobalModel] = (),
    ) -> None:
        self.coordinator = ServerCoordinator(plan, global_model.layout.numel, guard)
        self.shards = [
            ServerShard(part, plan.for_shard, key, make_log(part.held.numel), process=process)
            for process, part in enumerate(parts or [global_model])
        ]
        self.global_model = global_model
        self.coordinator.first_norm = math.sqrt(moments(global_model.vector).squares)
        self._copies = bool(parts)

    @property
    def members(self) -> Members:
        """The sites."""
        return self.coordinator.members

    @property
    def controller(self) -> Controller | GradientController | None:
        """Sets the sync schedule under `auto`; None where the strategy is fixed."""
        return self.coordinator.controller

    @property
    def down(self) -> Codec:
        """The codec of the next result."""
        return self.coordinator.down

    def set_holdings(self, site: str, ranks: Sequence[Intervals]) -> None:
        """Say what the ranks of a site hold; a site of which nothing was said has one rank that holds everything."""
        for shard in self.shards:
            shard.set_holdings(site, ranks)

    def residual(self) -> Tensor:
        """A copy of the residual of results."""
        found = torch.zeros(self.global_model.layout.numel, dtype=torch.float32)
        for shard in self.shards:
            scatter(found, Intervals.whole(found.numel()), shard.served, shard.residual.whole())
        return found

    def next_wake(self) -> float | None:
        """When the next deadline expires if nothing comes before, or None if no round is open."""
        return self.coordinator.next_wake()

    def waits_for(self) -> list[str]:
        """The sites that the oldest open round misses, sorted."""
        return self.coordinator.waits_for()

    # -- messages and time in ------------------------------------------------------------------

    def receive(self, message: Message, now: float) -> Outbox:
        """Handle a message from a site.

        Args:
            message: what has come, with all its values.
            now: the time.

        Returns:
            The messages to send, and what has happened.

        Raises:
            ProtocolError: the message is one that only sites receive, or has numbers that no site can have.
        """
        if isinstance(message, Push):
            out = Decisions()
            if message.seen <= self.coordinator.version:  # else the server has forgotten rounds, and asks for a Join
                self.coordinator.check_push(message)
            if self.coordinator.expects(message, out):
                own = [message.segments]
                if len(self.shards) > 1:
                    own = [of_holder(message.segments, shard.served) for shard in self.shards]
                facts = [
                    shard.receive(message.site, message.round, values)
                    for shard, values in zip(self.shards, own, strict=True)
                ]
                size = nbytes(without_values(message)) + sum(values_bytes(message.site, values) for values in own)
                self.coordinator.receive_push(message, facts_of_all(facts), size, now, out)
        elif isinstance(message, Join | Leave):
            out = self.coordinator.receive(message, now)
        else:
            raise ProtocolError(f"the global server was sent a {type(message).__name__}, which only sites receive")
        return self._carry_out(out, now)

    def operate(self, operation: Operation, now: float) -> Outbox:
        """Do what the operator of the run asks for."""
        return self._carry_out(self.coordinator.operate(operation, now), now)

    def wake(self, now: float) -> Outbox:
        """Handle the deadlines that have expired; to be called at the time that `next_wake` returned."""
        return self._carry_out(self.coordinator.wake(now), now)

    def _carry_out(self, out: Decisions, now: float) -> Outbox:
        out.messages += [(download.site, self._reply(download)) for download in out.downloads]
        self.coordinator.aligned = self.shards[0].aligned
        while (order := self.coordinator.next_order()) is not None:
            closed = self.coordinator.round_closed(order, [shard.close(order) for shard in self.shards], now)
            self._copy()
            out.messages += closed.messages
            out.closed += closed.closed
            out.refused += closed.refused
            out.limited += closed.limited
            out.aside += closed.aside
        return out

    def _reply(self, download: Download) -> JoinReply:
        """The reply to a site that joins, with all values."""
        if not download.reply.downloads:
            first, last = download.reply.version - len(download.results), download.reply.version
            missed = [shard.log.since(first, last) for shard in self.shards]
            found = [
                join_result(header, [one[place] for one in missed if one is not None])
                for place, header in enumerate(download.results)
            ]
            return replace(download.reply, results=tuple(found))
        parts = tuple(part for shard in self.shards for part in shard.model_parts(shard.served, download.codec))
        scalars = {name: value for shard in self.shards for name, value in shard.global_model.scalars().items()}
        return replace(download.reply, parts=parts, scalars=scalars)

    def _copy(self) -> None:
        """Bring `global_model` to what the shards have."""
        model = self.global_model
        for shard in self.shards if self._copies else ():
            part = shard.global_model
            scatter(model.vector, model.held, shard.served, part.vector)
            model.version, model.step = part.version, part.step

    # -- checkpoint ----------------------------------------------------------------------------

    def checkpoint(self) -> dict[str, Tensor]:
        """Copies of everything the server needs to go on after the last closed round, as named tensors."""
        found = self.coordinator.state()
        for place, shard in enumerate(self.shards):
            found |= with_prefix(f"shard {place}.", shard.state())
        return {name: tensor.clone() for name, tensor in found.items()}

    def restore(self, state: Mapping[str, Tensor]) -> Outbox:
        """Become the server of a checkpoint.

        Args:
            state: the named tensors of a checkpoint of the same model and strategy.

        Returns:
            Messages that ask every site, lost ones too, to join again.
        """
        for place, shard in enumerate(self.shards):
            shard.load(without_prefix(f"shard {place}.", state))
        self._copy()
        first, version = max(shard.log.first for shard in self.shards), self.global_model.version
        kept = self.shards[0].log.since(first - 1, version) if first <= version else ()
        self.coordinator.load(state, kept or ())
        return Outbox([(name, ServerRestarted()) for name in self.coordinator.lost_since_checkpoint()])

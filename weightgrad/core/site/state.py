"""A site in one process: its coordinator and its shards, behind one interface.

The simulator and the tests drive a site through this class; in a deployment each rank has a shard of its own
(`runtime/site/training.py`) and the same coordinator and shards do the same work.

Before each local step the driver calls `apply_results`, which applies the round results that are due, and asks
`blocked`. After each local step it calls `after_step`, which may return a push. `model` is the flat vector that the
site trains on; `core/site/update_shard.py` says what it contains.

Conservation, tested for every strategy: what the server has included + pushes in flight + residual + fresh update =
the sum of all local updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from weightgrad.codecs import Codec
from weightgrad.core.global_model import GlobalModel, Replica, digest_of
from weightgrad.core.local_model import FlatModel, scatter
from weightgrad.core.parts.triggers import DynamicThreshold
from weightgrad.core.site.ahead_model import AheadModel, OwnPush
from weightgrad.core.site.coordinator import SiteCoordinator
from weightgrad.core.site.gradient_shard import GradientShard
from weightgrad.core.site.schedule import StepTimer
from weightgrad.core.site.shard import SiteShard
from weightgrad.core.site.shard_orders import LoadOrder, PushOrder
from weightgrad.core.site.strategy import SiteStrategy
from weightgrad.core.site.update_shard import UpdateShard
from weightgrad.core.vector_checks import with_prefix, without_prefix
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.messages import JoinReply, Message, Push, RoundResult, Segment
from weightgrad.wire.sync_schedule import SyncSchedule

__all__ = ["SiteState", "SiteStrategy"]


class SiteState:
    """The state of one site.

    Memory, in vectors of the model's size: `model`, and what the shards hold. Where the sites share gradients, `model`
    is the global model's own vector, or with `resume=ahead` that of an `AheadModel`.

    Args:
        name: the site's name, unique in the run.
        global_model: the first global model; where gradients are shared, the site owns it from now on.
        plan: the site's parts of the strategy.
        samples: how many samples one of the site's steps sees, the weight of its pushes.
        key: the key of the random streams of the site's codecs.
        download_codec: the codec of the first download if the site comes late; None asks for the exact model.
        holdings: what each rank of the site holds; None: one rank holds everything.
    """

    def __init__(
        self,
        name: str,
        global_model: GlobalModel,
        plan: SiteStrategy,
        samples: int,
        key: int,
        *,
        download_codec: str | None = None,
        holdings: Sequence[Intervals] | None = None,
    ) -> None:
        self.coordinator = SiteCoordinator(name, plan, samples, download_codec=download_codec)
        self.layout = global_model.layout
        whole = Intervals.whole(self.layout.numel)
        self._ahead = AheadModel(global_model) if plan.shares_gradients and plan.resume.ahead else None
        if self._ahead is not None:
            self.model = self._ahead.vector
        else:
            self.model = global_model.vector if plan.shares_gradients else global_model.vector.clone()
        self.moved_by_push = False
        """Whether the last step ended with the residual leaving the local model."""
        locals_ = [FlatModel(self.model, whole, held) for held in holdings or [whole]]
        self.shards: list[SiteShard]
        if plan.shares_gradients:
            replica = Replica(global_model)
            self.shards = [GradientShard(name, self.layout, one, plan.for_shard, key, replica) for one in locals_]
        else:
            self.shards = [UpdateShard(name, self.layout, one, plan.for_shard, key) for one in locals_]
        self._replica = global_model if plan.shares_gradients else None

    # -- what drivers may ask ------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The site's name."""
        return self.coordinator.name

    @property
    def plan(self) -> SiteStrategy:
        """The site's parts of the strategy."""
        return self.coordinator.plan

    @property
    def step(self) -> int:
        """Local steps done."""
        return self.coordinator.progress.step

    @property
    def version(self) -> int:
        """The version of the site's global model."""
        return self.coordinator.version

    def global_model(self) -> Tensor:
        """The site's replica of the global model; a copy if several ranks hold it."""
        if self._replica is not None:
            return self._replica.vector
        own = [shard for shard in self.shards if isinstance(shard, UpdateShard)]
        if len(own) == 1:
            return own[0].global_model
        found = torch.empty(self.layout.numel, dtype=torch.float32)
        for shard in own:
            scatter(found, Intervals.whole(self.layout.numel), shard.held, shard.global_model)
        return found

    def digest(self) -> str:
        """A hash of the global model, equal on every site at the same version."""
        return f"{digest_of(self.global_model(), Intervals.whole(self.layout.numel)):016x}"

    def residual(self) -> Tensor:
        """A copy of the residual."""
        found = torch.zeros(self.layout.numel, dtype=torch.float32)
        for shard in self.shards:
            if shard.residual.vector is not None:
                scatter(found, Intervals.whole(self.layout.numel), shard.held, shard.residual.vector)
        return found

    def fresh_update(self) -> Tensor:
        """A copy of what the local steps did since the last push; zeros where gradients are shared."""
        found = torch.zeros(self.layout.numel, dtype=torch.float32)
        for shard in self.shards:
            if isinstance(shard, UpdateShard):
                scatter(found, Intervals.whole(self.layout.numel), shard.held, shard.fresh_update())
        return found

    @property
    def rate(self) -> float | None:
        """The learning rate to send with shared gradients, where the server does not know it; the driver sets it."""
        return self.coordinator.rate

    @rate.setter
    def rate(self, rate: float | None) -> None:
        self.coordinator.rate = rate

    @property
    def in_flight(self) -> int:
        """How many pushes have no result yet."""
        return len(self.coordinator.in_flight)

    @property
    def exact(self) -> bool:
        """Whether the global model has the bits of the server's model at that version."""
        return self.coordinator.exact

    @property
    def finishing(self) -> bool:
        """Whether training is over and the last push has been made."""
        return self.coordinator.progress.finishing

    @property
    def finished(self) -> bool:
        """Whether all of the site's updates are in the global model, and that model is exact."""
        return self.coordinator.finished

    @property
    def schedule(self) -> SyncSchedule | None:
        """The sync schedule in force, or None where the strategy is fixed."""
        return self.coordinator.schedule.current

    @property
    def overlap(self) -> int:
        """Steps the site goes on while a round is under way."""
        return self.coordinator.overlap

    @property
    def up(self) -> Codec:
        """The codec of the next push."""
        return self.coordinator.schedule.up

    @property
    def step_timer(self) -> StepTimer:
        """The site's own measurements."""
        return self.coordinator.step_timer

    @property
    def pushed(self) -> int:
        """The last round that the site has pushed for."""
        return self.coordinator.progress.pushed_round

    @property
    def full_downloads(self) -> int:
        """How often the whole global model has been downloaded."""
        return self.coordinator.full_downloads

    @property
    def threshold(self) -> DynamicThreshold | None:
        """The significance threshold, where the trigger has one."""
        return self.coordinator.threshold

    def join(self, *, same_start: bool = True) -> list[Message]:
        """Ask to join, for the first time or again after an absence.

        Args:
            same_start: whether the site started from the same weights as the others; if not, it needs a download.

        Returns:
            The messages to send.
        """
        return [self.coordinator.join(same_start=same_start)]

    # -- before a step -------------------------------------------------------------------------

    def blocked(self, now: float) -> str | None:
        """Whether the workers must wait before their next step; see `SiteCoordinator.blocked`."""
        return self.coordinator.blocked(now)

    def apply_results(self) -> list[RoundResult]:
        """Apply the round results that are due, in the order of versions.

        Returns:
            The results that were applied.
        """
        applied: list[RoundResult] = []
        while (found := self.coordinator.next_result()) is not None:
            order, result = found
            for shard in self.shards[:1] if self._replica is not None else self.shards:
                shard.apply(order, result)
            for shard in self.shards[1:] if self._replica is not None else ():
                shard.remove_through(order.through)
            applied.append(result)
        if applied:
            self._go_ahead()
        return applied

    def _go_ahead(self) -> None:
        """The global model has moved: put a local model that is ahead of it where it belongs."""
        if self._ahead is not None:
            pushes = [self._with_segments(sent.push) for sent in self.coordinator.in_flight]
            self._ahead.begin_again(OwnPush(push.segments, push.step, push.rate) for push in pushes)

    # -- after a step --------------------------------------------------------------------------

    def after_step(self, now: float, gradient: Tensor | None = None) -> list[Message]:
        """A local step is done; start a round if the trigger fires or the server has requested one.

        Args:
            now: the time.
            gradient: the step's gradient where gradients are shared; None if the step has moved `model`.

        Returns:
            The push, if a round starts.
        """
        self.moved_by_push = False
        made = None if gradient is None else FlatModel(gradient, Intervals.whole(gradient.numel()))
        for shard in self.shards:
            shard.stepped(made)
        found = self.coordinator.after_step(now, self._squares)
        push, order = (None, None) if found is None else found
        if push is None or order is None:
            for shard in self.shards:
                shard.keep(made)
                if push is not None:
                    shard.in_flight[push.round] = ()
            return [] if push is None else [push]
        self.moved_by_push = order.places
        push = self._push(push, order, made)
        if self._ahead is not None:
            self._ahead.advance(OwnPush(push.segments, push.step, push.rate))
        return [push]

    def finish(self, now: float) -> list[Message]:
        """Training is over: push all of the residual.

        Args:
            now: the time.

        Returns:
            The last push.
        """
        self.moved_by_push = False
        return [self._push(*self.coordinator.finish(now), None)]

    def _push(self, push: Push, order: PushOrder, gradient: FlatModel | None) -> Push:
        segments = [segment for shard in self.shards for segment in shard.push(order, gradient)]
        return replace(push, segments=_in_order(segments))

    def new_epoch(self) -> None:
        """An epoch has ended: the dynamic threshold moves."""
        self.coordinator.new_epoch(self._squares()[1])

    def _squares(self) -> tuple[float, float]:
        each = [shard.squares() for shard in self.shards]
        return math.fsum(since for since, _ in each), math.fsum(last for _, last in each)

    # -- messages in ---------------------------------------------------------------------------

    def receive(self, message: Message, now: float) -> list[Message]:
        """Handle a message from the server. Round results wait for `apply_results`.

        Args:
            message: what has come.
            now: the time.

        Returns:
            The messages to send.

        Raises:
            ProtocolError: the message is one that only the server receives, or does not fit this site's state.
        """
        messages, order = self.coordinator.receive(message, now)
        if order is not None and isinstance(message, JoinReply):
            self._load(message, order)
        return [self._with_segments(one) if isinstance(one, Push) else one for one in messages]

    def _load(self, reply: JoinReply, order: LoadOrder) -> None:
        for shard in self.shards:
            shard.begin_load(discards=order.discards)
            for part in reply.parts if self._replica is None or shard is self.shards[0] else ():
                for segment in part.segments:
                    shard.load(part.vector, segment)
            if self._replica is None or shard is self.shards[0]:
                shard.end_load(order, reply.scalars)
            else:
                shard.remove_through(order.included)
        self._go_ahead()

    def _with_segments(self, push: Push) -> Push:
        """A push that is sent again."""
        segments = [segment for shard in self.shards for segment in shard.in_flight.get(push.round, ())]
        return replace(push, segments=_in_order(segments))

    # -- checkpoint ----------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Copies of everything the site needs to go on from here, as named tensors.

        Results that are not applied yet are not part of it: the site asks for them again when it joins.
        """
        found = {**self.coordinator.state()}
        for rank, shard in enumerate(self.shards):
            found |= with_prefix(f"shard {rank}.", {name: tensor.clone() for name, tensor in shard.state().items()})
        return found if self._replica is not None else {**found, "model": self.model.clone()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; then call `join`.

        Args:
            state: the named tensors of a site with the same model and strategy.
        """
        self.coordinator.load(state)
        for rank, shard in enumerate(self.shards):
            shard.load_state(without_prefix(f"shard {rank}.", state))
        if self._replica is None:
            self.model.copy_(state["model"])
        self._go_ahead()


def _in_order(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    return tuple(sorted(segments, key=lambda segment: segment.start))

"""The site as a state machine: local steps, messages and the time go in, messages come out.

Before each local step the driver calls `apply_results`, which applies the round results that are due, and asks
`blocked`. After each local step it calls `after_step`, which may return a push. `model` is the flat vector that the
site trains on; `core/model_placement.py` says what it contains.

Conservation, tested for every strategy: what the server has included + pushes in flight + residual + fresh update =
the sum of all local updates.

This file has the round protocol: when a round starts and when a result is applied. Its parts: `push_builder` (how a
push is encoded), `in_flight` (pushes without a result), `model_placement` (where the local model goes), `rejoin`
(joining, downloads and replays), `step_update` (significance), `site_schedule` (the sync schedule), `site_progress`
(counters). `site_parts` holds the parts together and makes the checkpoint of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.codecs import Codec
from weightgrad.core.consistency import Consistency
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.in_flight import InFlightPushes
from weightgrad.core.model_placement import ModelPlacement
from weightgrad.core.push_builder import PushBuilder
from weightgrad.core.rejoin import SiteMembership
from weightgrad.core.residual import Residual
from weightgrad.core.resume import Resume
from weightgrad.core.selectors import All, Selector
from weightgrad.core.site_parts import SiteParts
from weightgrad.core.site_schedule import SiteSchedule, StepTimer
from weightgrad.core.step_update import StepUpdateTracker
from weightgrad.core.triggers import DynamicThreshold, Moment, Trigger
from weightgrad.errors import ProtocolError
from weightgrad.wire.messages import JoinReply, Message, RoundRequest, RoundResult, ServerRestarted
from weightgrad.wire.sync_schedule import SyncSchedule


@dataclass(frozen=True, kw_only=True)
class SiteStrategy:
    """A site's parts of a strategy."""

    shares_gradients: bool
    trigger: Trigger
    selector: Selector
    up: Codec
    per_tensor: bool
    keep_loss: bool
    consistency: Consistency
    overlap: int
    resume: Resume
    flush: Codec | None
    t: float | None = None  # seconds without a message after which the site waits for the oldest result
    schedule: SyncSchedule | None = None  # the first sync schedule, where the server sets it


class SiteState:
    """The state of one site.

    Memory: `SiteParts` holds every vector of the model's size.

    Args:
        name: the site's name, unique in the run.
        global_model: this site's replica of the global model, which the state owns from now on.
        plan: the site's parts of the strategy.
        samples: how many samples one of the site's steps sees, the weight of its pushes.
        key: the key of the random streams of the site's codecs.
        download_codec: the codec of the first download if the site comes late; None asks for the exact model.
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
    ) -> None:
        self.name = name
        self.global_model = global_model
        self.plan = plan
        self.residual_removed = False  # whether the last step ended with the residual leaving the local model
        self.step_timer = StepTimer()
        self.residual = Residual(
            global_model.layout, plan.up, key, per_tensor=plan.per_tensor, keep_loss=plan.keep_loss
        )
        in_flight = InFlightPushes()
        self._placement = ModelPlacement(
            global_model, self.residual, in_flight, plan.resume, shares_gradients=plan.shares_gradients
        )
        self.model = self._placement.model
        self._parts = SiteParts(
            global_model=global_model,
            residual=self.residual,
            in_flight=in_flight,
            placement=self._placement,
            steps=StepUpdateTracker(self.model, plan.trigger, selector_needs_step=plan.selector.needs_step),
            schedule=SiteSchedule(plan.schedule, up=plan.up, overlap=plan.overlap),
        )
        self._in_flight, self._inbox = in_flight, self._parts.inbox
        self._progress, self._schedule, self._steps = self._parts.progress, self._parts.schedule, self._parts.steps
        self._builder = PushBuilder(name, samples, self._parts, self.step_timer)
        self._membership = SiteMembership(name, self._parts, download_codec=download_codec)
        self._last_message_at = 0.0

    # -- what drivers may ask ------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Local steps done."""
        return self._progress.step

    @property
    def rate(self) -> float | None:
        """The learning rate to send with shared gradients, where the server does not know it; the driver sets it."""
        return self._builder.rate

    @rate.setter
    def rate(self, rate: float | None) -> None:
        self._builder.rate = rate

    @property
    def pushed(self) -> int:
        """The last round that the site has pushed for."""
        return self._progress.pushed_round

    @property
    def in_flight(self) -> int:
        """How many pushes have no result yet."""
        return len(self._in_flight)

    @property
    def exact(self) -> bool:
        """Whether the global model has the bits of the server's model at that version."""
        return self._membership.exact

    @property
    def full_downloads(self) -> int:
        """How often the whole global model has been downloaded."""
        return self._membership.full_downloads

    @property
    def finishing(self) -> bool:
        """Whether training is over and the last push has been made."""
        return self._progress.finishing

    @property
    def finished(self) -> bool:
        """Whether all of the site's updates are in the global model, and that model is exact."""
        return self._progress.finishing and not self._in_flight and self.exact

    @property
    def schedule(self) -> SyncSchedule | None:
        """The sync schedule in force, or None where the strategy is fixed."""
        return self._schedule.current

    @property
    def overlap(self) -> int:
        """Steps the site goes on while a round is under way."""
        return self._schedule.overlap

    @property
    def up(self) -> Codec:
        """The codec of the next push."""
        return self._schedule.up

    @property
    def threshold(self) -> DynamicThreshold | None:
        """The significance threshold, where the trigger has one."""
        return self._steps.threshold

    def join(self, *, same_start: bool = True) -> list[Message]:
        """Ask to join, for the first time or again after an absence.

        Args:
            same_start: whether the site started from the same weights as the others; if not, it needs a download.

        Returns:
            The messages to send.
        """
        return [self._membership.join(same_start=same_start)]

    # -- before a step -------------------------------------------------------------------------

    def blocked(self, now: float) -> str | None:
        """Whether the workers must wait before their next step.

        Args:
            now: the time.

        Returns:
            The reason ("joining", "exact global model", "flush", "result" or "stall"), or None to go on.
        """
        reason = self._why_blocked(now)
        if reason is None:
            self.step_timer.begins(now)
        return reason

    def _why_blocked(self, now: float) -> str | None:
        if not self._membership.joined:
            return "joining"
        if self.finishing and not self.exact:
            return "exact global model"
        if not self._in_flight:
            return None
        if self.finishing:
            return "flush"
        oldest = self._in_flight.oldest
        rounds_ahead = self._progress.round - oldest.push.round
        if rounds_ahead >= self.plan.consistency.ahead and self.step - oldest.push.step >= self.overlap:
            return "result"
        if self.plan.t is not None and now - max(self._last_message_at, oldest.sent_at) > self.plan.t:
            return "stall"
        return None

    def apply_results(self) -> list[RoundResult]:
        """Apply the round results that are due, in the order of versions.

        Returns:
            The results that were applied.
        """
        applied: list[RoundResult] = []
        if not self._membership.joined:
            return applied  # only the JoinReply tells whether they contain pushes that must be replayed
        while (result := self._inbox.get(self.global_model.version + 1)) is not None and self._is_due(result):
            del self._inbox[result.version]
            result = self._in_flight.fill_in(result, self.name)
            self._apply(result)
            applied.append(result)
        self._membership.catch_up_after_replay()
        return applied

    def _is_due(self, result: RoundResult) -> bool:
        """Whether a result may be applied at this step: the same step however fast the link is."""
        own = result.included.get(self.name)
        if own is None:
            return True
        if self._membership.is_replayed(own):
            return False
        if not self.overlap or self.finishing:
            return True
        # A result may contain several pushes of a site that was late: `blocked` waits for the oldest of them.
        pushed_at = self._in_flight.first_step_through(own)
        return pushed_at is not None and self.step >= pushed_at + self.overlap

    def _apply(self, result: RoundResult) -> None:
        fresh = None if self._placement.is_global_model else self._placement.fresh_update()
        self.global_model.apply(result)
        self._schedule.adopt(result.schedule)
        self._in_flight.remove_through(result.included.get(self.name, -1))
        if self.plan.consistency.missing:  # the others went on without this site: it does not repeat their steps
            self._progress.catch_up(result.step, self._progress.round)
        if fresh is not None:
            self._placement.place(fresh, result.segments, rounds_under_way=self._schedule.rounds_under_way)
            self._steps.model_was_moved()

    # -- after a step --------------------------------------------------------------------------

    def after_step(self, now: float, gradient: Tensor | None = None) -> list[Message]:
        """A local step is done; start a round if the trigger fires or the server has requested one.

        Args:
            now: the time.
            gradient: the step's gradient where gradients are shared; None if the step has moved `model`.

        Returns:
            The push, if a round starts.
        """
        self._progress.step += 1
        self.residual_removed = False
        self.step_timer.ends(now)
        self._steps.after_step(gradient)
        moment = self._moment()
        requested = self._progress.requested_round > self._progress.round
        starts = requested or self.plan.trigger.fires(moment)
        if not starts or not self.plan.trigger.sends(moment):
            if gradient is not None:
                self.residual.put(gradient)
            return [self._builder.push_nothing(now)] if starts else []
        self._progress.sent_step = self.step
        self._steps.pushed()
        self.residual_removed = self._push_removes_residual
        fresh = (
            self._placement.take_fresh_update(move_anchor=not self.residual_removed) if gradient is None else gradient
        )
        fragment = self.plan.trigger.fragment(moment)
        push = self._builder.push_selected(now, fresh, self.plan.selector, fragment=fragment)
        if self.residual_removed:
            self._placement.place_without_fresh_update(rounds_under_way=self._schedule.rounds_under_way)
            self._steps.model_was_moved()
        return [push]

    def finish(self, now: float) -> list[Message]:
        """Training is over: push all of the residual.

        Args:
            now: the time.

        Returns:
            The last push.
        """
        self._progress.finishing, self.residual_removed = True, False
        fresh = self._placement.take_fresh_update(move_anchor=True)
        nothing_left = not (bool(fresh.any()) or bool(self.residual.vector.any()))
        if self.plan.flush is None or nothing_left:
            self.residual.put(fresh)
            return [self._builder.push_nothing(now, final=True)]
        return [self._builder.push_selected(now, fresh, All(), codec=self.plan.flush, final=True)]

    def new_epoch(self, rate: float) -> None:
        """An epoch has ended with this learning rate: the dynamic threshold moves."""
        self._steps.new_epoch(rate)

    def _moment(self) -> Moment:
        return Moment(
            step=self.step,
            steps_since_push=self.step - self._progress.sent_step,
            ratio=lambda: self._steps.ratio(
                None if self._placement.is_global_model else self._placement.fresh_update()
            ),
            threshold=self._steps.threshold_value,
            steps_since_round=self.step - self._progress.round_step,
            every=self._schedule.every,
        )

    @property
    def _push_removes_residual(self) -> bool:
        """Whether what a push holds back leaves the local model with the push, not only when the result comes."""
        return self.plan.resume.removes_residual and not self._placement.is_global_model and self.overlap > 0

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
        self._last_message_at = now
        if isinstance(message, RoundResult):
            return self._receive_result(message, now)
        if isinstance(message, RoundRequest):
            self._progress.requested_round = max(self._progress.requested_round, message.round)
            return []
        if isinstance(message, ServerRestarted):
            return self.join()
        if isinstance(message, JoinReply):
            return self._membership.handle_reply(message, now)
        raise ProtocolError(f"site {self.name!r} was sent a {type(message).__name__}, which only the server receives")

    def _receive_result(self, result: RoundResult, now: float) -> list[Message]:
        own = result.included.get(self.name)
        if own is not None and (sent_at := self._in_flight.sent_at(own)) is not None:
            self.step_timer.result_received(own, now - sent_at)
        if result.version <= self.global_model.version:
            return []
        if self._membership.misses_own_push(result):  # the site has forgotten a push that the server thinks it has
            return self.join() if self._membership.joined else []
        self._inbox[result.version] = result
        return []

    # -- checkpoint ----------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Copies of everything the site needs to go on from here, as named tensors.

        Results that are not applied yet are not part of it: the site asks for them again when it joins.
        """
        found = {**self._parts.state(), **self._membership.state()}
        if self.rate is not None:
            found["rate"] = torch.tensor(self.rate, dtype=torch.float64)
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; then call `join`.

        Args:
            state: the named tensors of a site with the same model and strategy.
        """
        self._parts.load(state)
        self._membership.load(state)
        self.rate = float(state["rate"]) if "rate" in state else None

"""The decisions of a site: when a round starts, when a result is applied, how the site joins and leaves.

The coordinator is a state machine without vectors: local steps, messages and the time go in, messages and orders come
out. The orders are for the `SiteShard` of each rank, which does the work on what the rank holds. In a deployment the
coordinator lives on rank 0, and the orders are broadcast inside the site; in the simulator both are in one process
(`core/site/state.py`).

The coordinator has the entry points. Its parts decide:

    RoundTrigger (`core/site/round_trigger.py`)         when a round starts
    PushesInFlight (`core/site/pushes_in_flight.py`)    which pushes have no result yet
    ResultInbox (`core/site/result_inbox.py`)           when a result is due
    StallRule (`core/site/stall_rule.py`)               how long the server may be silent
    SiteJoining (`core/site/joining.py`)           how the site comes to the present global model
    Replay (`core/site/replay.py`)                      which pushes it makes again after a restore
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from weightgrad.core.parts.triggers import DynamicThreshold
from weightgrad.core.site.joining import SiteJoining
from weightgrad.core.site.progress import SiteProgress
from weightgrad.core.site.pushes_in_flight import PushesInFlight
from weightgrad.core.site.replay import Replay
from weightgrad.core.site.result_inbox import ResultInbox
from weightgrad.core.site.round_trigger import RoundTrigger, Squares
from weightgrad.core.site.schedule import SiteSchedule, StepTimer
from weightgrad.core.site.shard_orders import ApplyOrder, LoadOrder, PushOrder
from weightgrad.core.site.stall_rule import StallRule
from weightgrad.core.site.strategy import SiteStrategy
from weightgrad.core.vector_checks import with_prefix, without_prefix
from weightgrad.errors import ProtocolError
from weightgrad.wire.messages import Join, JoinReply, Message, Pause, Push, RoundRequest, RoundResult, ServerRestarted


class SiteCoordinator:
    """The coordinator of one site. Memory: no vector of the model's size; messages that wait to be applied.

    Args:
        name: the site's name, unique in the run.
        plan: the site's parts of the strategy.
        samples: how many samples one of the site's steps sees, the weight of its pushes.
        download_codec: the codec of the first download if the site comes late; None asks for the exact model.

    Attributes:
        progress: how far the site has come.
        schedule: the sync schedule in force.
        in_flight: the pushes without a result.
        inbox: the results that are not applied yet.
        joining: whether the site has joined, and with which global model.
        rate: the learning rate to send with shared gradients, where the server does not know it; the driver sets it.
        options: likewise, the optimizer's options if they are not those it announced.
        paused: whether the operator has paused the run.
    """

    def __init__(self, name: str, plan: SiteStrategy, samples: int, *, download_codec: str | None = None) -> None:
        self.name = name
        self.plan = plan
        self.samples = samples
        self.rate: float | None = None
        self.options: tuple[float, ...] = ()
        self.paused = False
        self.progress = SiteProgress()
        self.schedule = SiteSchedule(plan.schedule, up=plan.up, overlap=plan.overlap)
        self.step_timer = StepTimer()
        self.in_flight = PushesInFlight()
        replay = Replay(self.progress)
        self.inbox = ResultInbox(name, self.progress, self.schedule, self.in_flight, replay)
        self.joining = SiteJoining(
            name,
            progress=self.progress,
            schedule=self.schedule,
            in_flight=self.in_flight,
            inbox=self.inbox,
            replay=replay,
            resume=plan.resume,
            download_codec=download_codec,
        )
        self._replay = replay
        self._trigger = RoundTrigger(plan.trigger, self.progress, self.schedule)
        self._stall = StallRule(plan.t, adapts=plan.t_adapts)

    # -- what drivers may ask ------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version of the site's global model."""
        return self.progress.version

    @property
    def global_step(self) -> int:
        """The step of the site's global model."""
        return self.progress.global_step

    @property
    def joined(self) -> bool:
        """Whether the server has replied to the last Join."""
        return self.joining.joined

    @property
    def exact(self) -> bool:
        """Whether the global model has the bits of the server's model at that version."""
        return self.joining.exact

    @property
    def full_downloads(self) -> int:
        """How often the whole global model has been downloaded."""
        return self.joining.full_downloads

    @property
    def threshold(self) -> DynamicThreshold | None:
        """The significance threshold, where the trigger has one."""
        return self._trigger.threshold

    @property
    def finished(self) -> bool:
        """Whether all of the site's updates are in the global model, and that model is exact."""
        return self.progress.finishing and not self.in_flight and self.exact

    @property
    def overlap(self) -> int:
        """Steps the site goes on while a round is under way."""
        return self.schedule.overlap

    @property
    def in_flight_share(self) -> float:
        """How much of each push in flight the local model contains."""
        return self.plan.resume.in_flight_share(self.schedule.rounds_under_way)

    def next_decision(self) -> int:
        """The next step at which a round may start or a result may be applied; the steps before it decide nothing."""
        step, oldest = self.progress.step, self.in_flight.oldest
        if not self.plan.consistency.steady or self.plan.trigger.calls:
            return step + 1
        if self.plan.t is not None and oldest is not None:
            return step + 1  # T may run out at any step
        due = [self._trigger.next_step()]
        if oldest is not None:
            due.append(oldest.push.step + self.overlap)
        return max(step + 1, min(due))

    # -- before a step -------------------------------------------------------------------------

    def blocked(self, now: float) -> str | None:
        """Whether the workers must wait before their next step.

        Args:
            now: the time.

        Returns:
            The reason ("joining", "exact global model", "paused", "flush", "result" or "stall"), or None to go on.
        """
        reason = self._why_blocked(now)
        if reason is None:
            self.step_timer.begins(now)
        return reason

    def _why_blocked(self, now: float) -> str | None:
        if not self.joined or self.joining.catches_up():
            return "joining"
        if self.progress.finishing and not self.exact:
            return "exact global model"
        if self.paused:
            return "paused"
        oldest = self.in_flight.oldest
        if oldest is None:
            return None
        if self.progress.finishing:
            return "flush"
        rounds_ahead = self.progress.round - oldest.push.round
        if rounds_ahead >= self.plan.consistency.ahead and self.progress.step - oldest.push.step >= self.overlap:
            return "result"
        # A result that has come and is not due keeps its push in flight. The server owes nothing for it and may rightly
        # be silent: it waits for the next push of this very site, which a stall would keep back for ever.
        owed = self.in_flight.after(self.inbox.answered_through)
        return "stall" if owed and self._stall.stalls(owed[0].sent_at, now) else None

    def next_result(
        self, has_values: Callable[[int], bool] = lambda version: True
    ) -> tuple[ApplyOrder, RoundResult] | None:
        """The next round result if it is due, which counts as applied from then on.

        Args:
            has_values: whether the values of the result of some version are here.
        """
        if not self.joined:
            return None  # only the JoinReply tells whether it contains pushes that must be replayed
        result = self.inbox.following
        if result is None or not self.inbox.is_due(result) or not has_values(result.version):
            self._replay.catch_up()
            return None
        self.inbox.remove_through(result.version)
        through = result.included.get(self.name, -1)
        self.progress.version, self.progress.global_step = result.version, result.step
        self.schedule.adopt(result.schedule)
        self.in_flight.remove_through(through)
        if self.plan.consistency.missing:  # the others went on without this site: it does not repeat their steps
            self.progress.catch_up(result.step, self.progress.round)
        return ApplyOrder(version=self.version, through=through, in_flight_share=self.in_flight_share), result

    # -- after a step --------------------------------------------------------------------------

    def step_done(self, now: float) -> None:
        """Count a local step at which nothing is decided."""
        self.progress.step += 1
        self.step_timer.ends(now)

    def after_step(self, now: float, squares: Squares) -> tuple[Push, PushOrder | None] | None:
        """A local step is done; start a round if the trigger fires or the server has requested one.

        Args:
            now: the time.
            squares: measures the fresh update and the last step, where the trigger compares them.

        Returns:
            The push without its segments, and what to encode for it (None: nothing); or None if no round starts.
        """
        self.step_done(now)
        moment = self._trigger.moment(squares)
        if not self._trigger.starts(moment):
            return None
        if not self.plan.trigger.sends(moment):
            return self._start(now), None
        self.progress.sent_step = self.progress.step
        fragment, codec = self.plan.trigger.fragment(moment), self.schedule.announced_codec
        waits = not self.overlap and not self.plan.consistency.ahead
        push = self._start(now)
        return push, PushOrder(
            round=push.round,
            step=push.step,
            fragment=fragment,
            threshold=self._trigger.threshold_value,
            codec=None if codec is None else str(codec),
            places=not waits and not self.plan.shares_gradients and self._local_model_moves,
            waits=waits,
            in_flight_share=self.in_flight_share,
        )

    @property
    def _local_model_moves(self) -> bool:
        """Whether a push takes something out of the local model: what it holds back, or what its codec discards."""
        return self.plan.resume.removes_residual or not self.plan.keep_loss

    def finish(self, now: float, *, flush: bool = True) -> tuple[Push, PushOrder]:
        """Training is over: push the residual, or as much of it as the strategy says.

        Args:
            now: the time.
            flush: whether anything is pushed at all.

        Returns:
            The last push without its segments, and what to encode for it.
        """
        self.progress.finishing = True
        push = self._start(now, final=True)
        return push, PushOrder(round=push.round, step=push.step, final=True, flush=flush, waits=True)

    def _start(self, now: float, *, final: bool = False) -> Push:
        push = Push(
            site=self.name,
            round=self.progress.start_round(),
            after=self.progress.pushed_round,
            step=self.progress.step,
            seen=self.version,
            samples=self.samples,
            final=final,
            rate=self.rate,
            options=self.options,
            report=self.step_timer.report() if self.schedule.current is not None else None,
        )
        self.progress.pushed()
        self.in_flight.add(push, now)
        return push

    def with_buffers(self, push: Push, buffers: Mapping[str, Tensor]) -> Push:
        """Let the site's buffers ride on a push that has not been sent yet."""
        made = replace(push, buffers=buffers)
        self.in_flight.replace_push(push, made)
        return made

    def new_epoch(self, last_squares: float) -> None:
        """An epoch has ended: the dynamic threshold moves.

        Args:
            last_squares: the squared norm of the last step's update.
        """
        self._trigger.new_epoch(last_squares)

    # -- messages in ---------------------------------------------------------------------------

    def receive(self, message: Message, now: float) -> tuple[list[Message], LoadOrder | None]:
        """Handle a message from the server. Round results wait for `next_result`.

        Args:
            message: what has come.
            now: the time.

        Returns:
            The messages to send, in which pushes have no segments; and what to load before, if a model comes with it.

        Raises:
            ProtocolError: the message is one that only the server receives, or does not fit this site's state.
        """
        self._stall.message_received(now)
        if isinstance(message, RoundResult):
            return self._receive_result(message, now), None
        if isinstance(message, RoundRequest):
            self.progress.requested_round = max(self.progress.requested_round, message.round)
            return [], None
        if isinstance(message, Pause):
            self.paused = message.paused
            return [], None
        if isinstance(message, ServerRestarted):
            return [self.join()], None
        if isinstance(message, JoinReply):
            found = self.joining.receive(message, now)
            self.paused = self.paused and self.joined  # where it asks again, a pause that still lasts is told anew
            return found
        raise ProtocolError(f"site {self.name!r} was sent a {type(message).__name__}, which only the server receives")

    def _receive_result(self, result: RoundResult, now: float) -> list[Message]:
        own = result.included.get(self.name)
        sent_at = self.in_flight.sent_at(own)
        if own is not None and sent_at is not None:
            self.step_timer.result_received(own, now - sent_at)
            self._stall.result_received(now - sent_at)
        if result.version <= self.version:
            return []
        if self.inbox.misses_own_push(result):  # the site has forgotten a push that the server thinks it has
            return [self.join()] if self.joined else []
        self.inbox.add(result)
        return []

    # -- joining -------------------------------------------------------------------------------

    def join(self, *, same_start: bool = True, digest: int | None = None) -> Join:
        """The message that asks to join, for the first time or again.

        Args:
            same_start: whether the site started from the same weights as the others; if not, it needs a download.
            digest: of the site's weights, from which the server tells whether it needs a download; None if they were
                trained already, or `same_start` says it.

        Returns:
            A Join with the version that the site has.
        """
        self.paused = False  # a pause that still lasts is told anew
        return self.joining.join(same_start=same_start, digest=digest)

    # -- checkpoint ----------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Everything a checkpoint needs, as named tensors.

        Results that are not applied yet are not part of it: the site asks for them again when it joins.
        """
        found = {"clock": self.progress.to_tensor(), **self.schedule.state()}
        if self.threshold is not None:
            found["threshold"] = self.threshold.state()
        found |= self.joining.state()
        if self.rate is not None:
            found["rate"] = torch.tensor(self.rate, dtype=torch.float64)
        return found | with_prefix("push.", self.in_flight.state())

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; then call `join`. Pushes in flight count as sent at time 0."""
        self.progress.load_tensor(state["clock"])
        self.schedule.load(state)
        if self.threshold is not None:
            self.threshold.load(state["threshold"])
        self.joining.load(state)
        self.rate = float(state["rate"]) if "rate" in state else None
        self.inbox.clear()
        self.in_flight.load(without_prefix("push.", state))

"""The decisions of a site: when a round starts, when a result is applied, how the site joins and leaves.

The coordinator is a state machine without vectors: local steps, messages and the time go in, messages and orders come
out. The orders are for the `SiteShard` of each rank, which does the work on what the rank holds. In a deployment the
coordinator lives on rank 0, and the orders are broadcast inside the site; in the simulator both are in one process
(`core/site_state.py`).

Joining. The server replies to a Join with the way to the present global model: the round results that the site missed,
or the whole model. What the site has made and the server does not have stays with the site: its pushes in flight are
sent again, its residual and fresh update stay. A site that was restored from an old checkpoint replays its steps: the
server drops the pushes that it has, and their results arrive in the same places as before.

A site that comes late may ask for its first download through a lossy codec. It trains on the approximate model at once
and asks for the exact one meanwhile. Until that has come, its global model is not `exact`: the one exception to "the
same bits on every site".
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weightgrad.codecs import Codec
from weightgrad.core.consistency import Consistency
from weightgrad.core.resume import Resume
from weightgrad.core.selectors import Selector
from weightgrad.core.site_progress import SiteProgress
from weightgrad.core.site_schedule import SiteSchedule, StepTimer
from weightgrad.core.site_shard import ApplyOrder, LoadOrder, PushOrder, ShardPlan
from weightgrad.core.triggers import DynamicThreshold, Moment, Significance, Trigger
from weightgrad.errors import ProtocolError
from weightgrad.wire.message_bytes import pack, unpack
from weightgrad.wire.messages import (
    Join,
    JoinReply,
    Message,
    Pause,
    Push,
    RoundRequest,
    RoundResult,
    ServerRestarted,
)
from weightgrad.wire.sync_schedule import SyncSchedule

_STALL_ROUNDS = 5  # an adaptive T is this many times as long as a round usually takes

Squares = Callable[[], tuple[float, float]]
"""The squared norms of what was made since the last push and of the last step, summed over the ranks of the site."""


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
    flush_local: bool = False  # of the residual only what the local model contains is sent at the end
    t: float | None = None  # seconds without a message after which the site waits for the oldest result
    t_adapts: bool = False  # whether `t` is only the least, and grows with the length of rounds
    schedule: SyncSchedule | None = None  # the first sync schedule, where the server sets it

    @property
    def for_shard(self) -> ShardPlan:
        """The parts that work on what a rank holds."""
        return ShardPlan(
            selector=self.selector,
            up=self.up,
            per_tensor=self.per_tensor,
            keep_loss=self.keep_loss,
            resume=self.resume,
            flush=self.flush,
            flush_local=self.flush_local,
            measures=isinstance(self.trigger, Significance),
        )


@dataclass
class InFlight:
    """A push without a result: what was said about it, and when it was last sent. Its segments are with the shards."""

    push: Push
    sent_at: float


class SiteCoordinator:
    """The coordinator of one site. Memory: no vector of the model's size; messages that wait to be applied.

    Args:
        name: the site's name, unique in the run.
        plan: the site's parts of the strategy.
        samples: how many samples one of the site's steps sees, the weight of its pushes.
        download_codec: the codec of the first download if the site comes late; None asks for the exact model.

    Attributes:
        version: the version of the site's global model.
        global_step: the step of the site's global model.
        joined: whether the server has replied to the last Join.
        exact: whether the global model has the bits of the server's model at that version.
        full_downloads: how often the whole global model has been downloaded.
        replay_until: after a restore from an old checkpoint, the last round whose push the server has already.
        rate: the learning rate to send with shared gradients, where the server does not know it; the driver sets it.
        options: likewise, the optimizer's options if they are not those it announced.
        epoch: of the site's processes; the driver sets it.
        replays: whether a site that has forgotten pushes computes them again, step by step, as one that goes on from a
            checkpoint does. Otherwise it begins from the present global model, so that nothing it does is dropped as a
            repetition. The driver sets it.
        paused: whether the operator has paused the run.
    """

    def __init__(self, name: str, plan: SiteStrategy, samples: int, *, download_codec: str | None = None) -> None:
        self.name = name
        self.plan = plan
        self.samples = samples
        self.version = 0
        self.global_step = 0
        self.joined = False
        self.exact = True
        self.full_downloads = 0
        self.replay_until = 0
        self.rate: float | None = None
        self.options: tuple[float, ...] = ()
        self.epoch = 0
        self.replays = True
        self.paused = False
        self.progress = SiteProgress()
        self.schedule = SiteSchedule(plan.schedule, up=plan.up, overlap=plan.overlap)
        self.step_timer = StepTimer()
        trigger = plan.trigger
        self.threshold = (
            DynamicThreshold(trigger.threshold, trigger.low, trigger.high)
            if isinstance(trigger, Significance)
            else None
        )
        self.inbox: dict[int, RoundResult] = {}  # results not applied yet, by version
        self.in_flight: list[InFlight] = []  # in the order of their rounds
        self._download_codec = download_codec
        self._discarded_through = 0  # the server has pushes through this round of which nothing is known here any more
        self._catch_up_to: tuple[int, int] | None = None  # (step, round) of the others, for after the replay
        self._joined_at = 0  # the version of the global model when the server last replied to a Join
        self._last_message_at = 0.0
        self._round_seconds: deque[float] = deque(maxlen=20)  # from a push to its result

    # -- what drivers may ask ------------------------------------------------------------------

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
        step = self.progress.step
        if not self.plan.consistency.steady or self.plan.trigger.calls:
            return step + 1
        if self.plan.t is not None and self.in_flight:
            return step + 1  # T may run out at any step
        due = [self.plan.trigger.next_step(self._moment(lambda: (0.0, 0.0)))]
        due += [sent.push.step + self.overlap for sent in self.in_flight[:1]]
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
        if not self.joined or self._catches_up():
            return "joining"
        if self.progress.finishing and not self.exact:
            return "exact global model"
        if self.paused:
            return "paused"
        if not self.in_flight:
            return None
        if self.progress.finishing:
            return "flush"
        oldest = self.in_flight[0]
        rounds_ahead = self.progress.round - oldest.push.round
        if rounds_ahead >= self.plan.consistency.ahead and self.progress.step - oldest.push.step >= self.overlap:
            return "result"
        if (owed := self._unanswered()) is not None:
            silent = now - max(self._last_message_at, owed.sent_at)
            return "stall" if silent > self._stall_seconds else None
        return None

    @property
    def _stall_seconds(self) -> float:
        """Seconds without a message after which the site waits: fixed, or grown to five times what rounds take."""
        if self.plan.t is None:
            return math.inf
        if not self.plan.t_adapts or not self._round_seconds:
            return self.plan.t
        return max(self.plan.t, _STALL_ROUNDS * statistics.median(self._round_seconds))

    def _unanswered(self) -> InFlight | None:
        """The oldest push whose result has not come.

        A result that has come and is not due keeps its push in flight. The server owes nothing for it and may rightly
        be silent: it waits for the next push of this very site, which a stall would keep back for ever.
        """
        answered = max((result.included.get(self.name, -1) for result in self.inbox.values()), default=-1)
        return next((sent for sent in self.in_flight if sent.push.round > answered), None)

    def _catches_up(self) -> bool:
        """Whether results that the site missed are still to be applied before it may go on."""
        if self.version >= self._joined_at:
            return False
        result = self.inbox.get(self.version + 1)
        return result is None or self._is_due(result)  # one that is not due waits for steps that are replayed

    def next_result(
        self, has_values: Callable[[int], bool] = lambda version: True
    ) -> tuple[ApplyOrder, RoundResult] | None:
        """The next round result if it is due, which counts as applied from then on.

        Args:
            has_values: whether the values of the result of some version are here.
        """
        if not self.joined:
            return None  # only the JoinReply tells whether it contains pushes that must be replayed
        result = self.inbox.get(self.version + 1)
        if result is None or not self._is_due(result) or not has_values(result.version):
            self._catch_up_after_replay()
            return None
        del self.inbox[result.version]
        through = result.included.get(self.name, -1)
        self.version, self.global_step = result.version, result.step
        self.schedule.adopt(result.schedule)
        self.in_flight = [sent for sent in self.in_flight if sent.push.round > through]
        if self.plan.consistency.missing:  # the others went on without this site: it does not repeat their steps
            self.progress.catch_up(result.step, self.progress.round)
        return ApplyOrder(version=self.version, through=through, in_flight_share=self.in_flight_share), result

    def _is_due(self, result: RoundResult) -> bool:
        """Whether a result may be applied at this step: the same step however fast the link is."""
        own = result.included.get(self.name)
        if own is None:
            return True
        if self.progress.pushed_round < own <= self.replay_until:
            return False  # the push is in the server's hands, and is about to be made again here
        if not self.overlap or self.progress.finishing:
            return True
        # A result may contain several pushes of a site that was late: `blocked` waits for the oldest of them.
        pushed_at = next((sent.push.step for sent in self.in_flight if sent.push.round <= own), None)
        if pushed_at is None:
            return True  # a push that was made before the site lost its state: nothing here waits for its result
        return self.progress.step >= pushed_at + self.overlap

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
        moment = self._moment(squares)
        starts = self.progress.requested_round > self.progress.round or self.plan.trigger.fires(moment)
        if not starts:
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
            threshold=self.threshold.value if self.threshold is not None else 0.0,
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
        self.in_flight.append(InFlight(push, now))
        return push

    def with_buffers(self, push: Push, buffers: Mapping[str, Tensor]) -> Push:
        """Let the site's buffers ride on a push that has not been sent yet."""
        made = replace(push, buffers=buffers)
        self.in_flight = [replace(sent, push=made) if sent.push is push else sent for sent in self.in_flight]
        return made

    def new_epoch(self, last_squares: float) -> None:
        """An epoch has ended: the dynamic threshold moves.

        Args:
            last_squares: the squared norm of the last step's update.
        """
        if self.threshold is not None:
            self.threshold.measured(math.sqrt(last_squares))
            self.threshold.epoch()

    def _moment(self, squares: Squares) -> Moment:
        def ratio() -> float:
            since, last = squares()
            if self.threshold is not None:
                self.threshold.measured(math.sqrt(last))
            return math.sqrt(since / last) if last > 0 else 0.0

        return Moment(
            step=self.progress.step,
            steps_since_push=self.progress.step - self.progress.sent_step,
            ratio=ratio,
            threshold=self.threshold.value if self.threshold is not None else 0.0,
            steps_since_round=self.progress.step - self.progress.round_step,
            every=self.schedule.every,
        )

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
        self._last_message_at = now
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
            return self._receive_reply(message, now)
        raise ProtocolError(f"site {self.name!r} was sent a {type(message).__name__}, which only the server receives")

    def _receive_result(self, result: RoundResult, now: float) -> list[Message]:
        own = result.included.get(self.name)
        sent_at = next((sent.sent_at for sent in self.in_flight if sent.push.round == own), None)
        if own is not None and sent_at is not None:
            self.step_timer.result_received(own, now - sent_at)
            self._round_seconds.append(now - sent_at)
        if result.version <= self.version:
            return []
        if self._misses_own_push(result):  # the site has forgotten a push that the server thinks it has
            return [self.join()] if self.joined else []
        self.inbox[result.version] = result
        return []

    def _misses_own_push(self, result: RoundResult) -> bool:
        """Whether a relayed result leaves out a push that this site neither has in flight nor is about to replay."""
        left_out = {push.round for push in result.relayed if push.segments is None}
        replayed = range(self.progress.pushed_round + 1, self.replay_until + 1)
        return not left_out <= {sent.push.round for sent in self.in_flight}.union(replayed)

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
        self.joined = self.paused = False  # a pause that still lasts is told anew
        self.exact = self.exact and same_start
        return Join(
            site=self.name,
            version=self.version if self.exact else -1,
            epoch=self.epoch,
            digest=digest,
            download_codec=self._download_codec if self.version == 0 else None,
        )

    def _receive_reply(self, reply: JoinReply, now: float) -> tuple[list[Message], LoadOrder | None]:
        if not self.replays and not reply.downloads and reply.pushed > self._known_through:
            return [self.join(same_start=False)], None
        was_joined, self.joined = self.joined, True
        self._joined_at = reply.version
        # The site was training on an approximate model and had asked for the exact one meanwhile.
        exact_followed = was_joined and not self.exact and reply.downloads
        rounds_missed = reply.round - 1 > reply.pushed
        order = self._take_over(reply) if reply.downloads else None
        for result in reply.results:
            if result.version > self.version:
                self.inbox[result.version] = result
        others_at = (reply.step, reply.round - 1)
        if not reply.downloads and reply.pushed > self._known_through:
            # The checkpoint is older than the last push. The site replays what it has forgotten: the server drops
            # the pushes it has, and the results apply at the same steps. Then the site goes where the others are.
            self.replay_until = reply.pushed
            self._catch_up_to = others_at if rounds_missed else None
        elif rounds_missed or (reply.downloads and not exact_followed):
            self.progress.catch_up(*others_at)
        if exact_followed:
            return [], order  # nothing was lost: what the server lacks is on its way behind the Join
        if reply.downloads and self.exact:
            return [self.join()], order  # when the model is here, the site says so and is awaited again
        messages: list[Message] = []
        for sent in self.in_flight:
            if sent.push.round > reply.included:
                sent.sent_at = now
                messages.append(sent.push)
        if not was_joined and not self.exact:
            messages.append(Join(site=self.name, version=-1, epoch=self.epoch, training=True))
        return messages, order

    def _take_over(self, reply: JoinReply) -> LoadOrder:
        """Take over the whole global model; everything of the site's own that it lacks stays with the site.

        A checkpoint older than the last push may hold a residual that was pushed since. Then the residual is
        discarded: better lost than sent twice.
        """
        if reply.version < self.version:
            raise ProtocolError(
                f"{self.name!r} has global model version {self.version}, the server only {reply.version}: "
                "the server was restored from an older checkpoint; restore the sites from the same one"
            )
        discards = reply.pushed > self._known_through
        if discards:
            self.in_flight = []
            self._discarded_through = reply.pushed
            self.progress.round = max(self.progress.round, reply.pushed)  # a second push for a round would be dropped
        self.inbox = {version: result for version, result in self.inbox.items() if version > reply.version}
        self.in_flight = [sent for sent in self.in_flight if sent.push.round > reply.included]
        self.version, self.global_step = reply.version, reply.step
        self.exact = not reply.approximate
        self.full_downloads += 1
        self.schedule.adopt(reply.schedule)
        return LoadOrder(
            version=reply.version,
            step=reply.step,
            included=reply.included,
            discards=discards,
            in_flight_share=self.in_flight_share,
        )

    @property
    def _known_through(self) -> int:
        """The last round of which the site knows whether the server has its push."""
        return max(self.progress.pushed_round, self._discarded_through)

    def _catch_up_after_replay(self) -> None:
        """Go on where the other sites are, if the replay is over."""
        if self._catch_up_to is not None and self.progress.pushed_round >= self.replay_until:
            self.progress.catch_up(*self._catch_up_to)
            self._catch_up_to = None

    # -- checkpoint ----------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Everything a checkpoint needs, as named tensors.

        Results that are not applied yet are not part of it: the site asks for them again when it joins.
        """
        found = {
            "clock": self.progress.to_tensor(version=self.version, global_step=self.global_step),
            **self.schedule.state(),
        }
        if self.threshold is not None:
            found["threshold"] = self.threshold.state()
        if not self.exact:
            found["approximate"] = torch.tensor(1)
        if self._discarded_through:
            found["discarded_through"] = torch.tensor(self._discarded_through)
        if self.rate is not None:
            found["rate"] = torch.tensor(self.rate, dtype=torch.float64)
        for sent in self.in_flight:
            found[f"push.{sent.push.round}"] = _push_to_tensor(sent.push)
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; then call `join`. Pushes in flight count as sent at time 0."""
        self.version, self.global_step = self.progress.load_tensor(state["clock"])
        self.schedule.load(state)
        if self.threshold is not None:
            self.threshold.load(state["threshold"])
        self.joined, self.exact = False, "approximate" not in state
        self._discarded_through = int(state["discarded_through"]) if "discarded_through" in state else 0
        self.rate = float(state["rate"]) if "rate" in state else None
        self.inbox.clear()
        pushes = sorted((name for name in state if name.startswith("push.")), key=lambda name: int(name[5:]))
        self.in_flight = [InFlight(_push_from_tensor(state[name]), 0.0) for name in pushes]


def _push_to_tensor(push: Push) -> Tensor:
    return torch.frombuffer(bytearray(pack(replace(push, segments=()))), dtype=torch.uint8)


def _push_from_tensor(tensor: Tensor) -> Push:
    push = unpack(bytes(tensor.numpy()))
    assert isinstance(push, Push)
    return push

"""The decisions of the global server: who is in, when a round closes and with which pushes, what a joining site gets.

The coordinator is a state machine without vectors: messages and the time go in, messages, orders and the next deadline
come out. The orders are for the `ServerShard` of each server process, which does the work on what the process serves,
so that all elements close with the same pushes.

A round opens with its first push (`_open_round`). It closes when every awaited site has pushed; with `backup(b)`, when
all but b of them have pushed for this very round (`next_order`). Rounds close in order. The shards aggregate, encode
and move; then `round_closed` makes the result and its messages.

Deadlines: a site that is missing `t_local` seconds after a round opened is reported as holding the others back; after
`t_global` seconds it is lost, and the round closes without it. A push is included once, by (site, round); one that
comes after its round has closed goes into the round that is open.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from weightgrad import codecs
from weightgrad.codecs import Codec, Fp32
from weightgrad.core.aggregators import Aggregator
from weightgrad.core.agreed_numbers import MOST_RATE, AgreedNumbers
from weightgrad.core.agreement import Signs
from weightgrad.core.consistency import Consistency
from weightgrad.core.controller import Auto, Decision
from weightgrad.core.gradient_controller import Gradients
from weightgrad.core.guard import CREDIT, Guard, Weighed
from weightgrad.core.membership import Member, Members
from weightgrad.core.open_round import ClosedRound, OpenRound, Outbox
from weightgrad.core.operation import Action, Operation, Pause
from weightgrad.core.round_timing import LinkObserver, RoundDeadlines
from weightgrad.core.selectors import Selector
from weightgrad.core.server_shard import ClosedPart, ClosedPush, CloseOrder, PushFacts, ServerShardPlan
from weightgrad.core.shared_buffers import SharedBuffers
from weightgrad.core.site_schedule import schedule_from_tensor, schedule_to_tensor
from weightgrad.core.vector_checks import with_prefix, without_prefix
from weightgrad.errors import ProtocolError
from weightgrad.wire import messages
from weightgrad.wire.message_parts import merge_relayed, without_values
from weightgrad.wire.messages import (
    Join,
    JoinReply,
    Leave,
    Push,
    RoundRequest,
    RoundResult,
    ServerRestarted,
    Waiting,
    check_download_codec,
    nbytes,
)

_HEADERS = 4096  # round results that are remembered without their values
LIVES = 4
"""A site that was restarted without its state may push so often for as many rounds as it may be ahead."""
_AHEAD_ALONE = 4096  # rounds that a site may count further than the server, where each push is a round of its own


@dataclass(frozen=True, kw_only=True)
class ServerStrategy:
    """The server's parts of a strategy."""

    aggregator: Aggregator
    consistency: Consistency
    down: Codec
    down_selector: Selector
    per_tensor: bool
    keep_loss: bool
    flush: Codec | None
    calls: bool  # the server requests a push of every site when a round opens
    t_local: float | None = None
    t_global: float | None = None
    adapts: bool = False  # t_global is the least timeout, and grows with the length of rounds
    auto: Auto | Gradients | None = None  # the server sets the sync schedule
    relay: int = 0  # with so many sites or fewer, pushes are relayed as they came
    rounds_ahead: int = 1  # a site may push for so many rounds after the last closed one
    steps_a_round: float = math.inf  # a site does at most so many steps from one round to the next

    @property
    def for_shard(self) -> ServerShardPlan:
        """The parts that work on what a process serves."""
        return ServerShardPlan(
            aggregator=self.aggregator,
            down=self.down,
            down_selector=self.down_selector,
            per_tensor=self.per_tensor,
            keep_loss=self.keep_loss,
            flush=self.flush,
            compensation=self.consistency.compensation,
            most_waiting=self.most_waiting,
        )

    @property
    def most_waiting(self) -> int:
        """How many pushes of a site may wait for their rounds to close, those of its former lives too."""
        return LIVES * (2 if self.consistency.alone else self.rounds_ahead)


@dataclass(frozen=True, kw_only=True)
class Download:
    """A site that needs the global model, or the results after some version.

    Attributes:
        site: the site.
        epoch: of the processes of the site that asked; None if they have not asked.
        reply: what it is told.
        results: the versions whose results it needs, without their values.
        codec: the codec in which it wants the model; None: exact.
    """

    site: str
    epoch: int | None
    reply: JoinReply
    results: tuple[RoundResult, ...] = ()
    codec: Codec | None = None


@dataclass
class Decisions(Outbox):
    """Messages to send, what has happened, and the sites that need values from the shards."""

    downloads: list[Download] = field(default_factory=list)


class ServerCoordinator:
    """The coordinator of the global server. Memory: no vector of the model's size.

    Args:
        plan: the server's parts of the strategy.
        numel: the elements of the model.
        guard: checks every push; a push that it refuses counts as empty, and its round closes all the same.

    Attributes:
        version: the version of the global model.
        step: its step.
        members: the sites.
        controller: sets the sync schedule under `auto`; None where the strategy is fixed.
        first_digest: the digest of the first global model; a site that has it needs no download.
        buffers: those of the sites' modules.
        first_norm: the norm of the first global model; a first push of that size is plausible.
        most_rate: the largest learning rate that a site may state.
        elsewhere: whether only the sites can step with the gradients that they share: the server has the first global
            model and the results since, as far as it remembers them.
        pause: whether the operator has paused the run.
        aligned: whether every piece of a push is needed by one rank of each other site, so that pushes can be relayed.
    """

    def __init__(self, plan: ServerStrategy, numel: int, guard: Guard | None = None) -> None:
        self.plan = plan
        self.version = 0
        self.step = 0
        self.members = Members()
        self.controller = plan.auto.controller(numel) if plan.auto is not None else None
        self.first_digest: int | None = None
        self.buffers = SharedBuffers()
        self.first_norm = 0.0
        self.most_rate = MOST_RATE
        self.elsewhere = False
        self.aligned = True
        self.pause = Pause()
        self._guard = guard
        self._deadlines = RoundDeadlines(t_local=plan.t_local, t_global=plan.t_global, adapts=plan.adapts)
        self._links = LinkObserver(self.controller)
        self._rounds: dict[int, OpenRound] = {}  # the open rounds, by number
        self._closing: tuple[int, OpenRound] | None = None  # the round that the shards are closing
        self._last_closed = 0  # the number of the last closed round
        self._agreed = AgreedNumbers()
        self._has_residual = False  # whether results may have lost something
        self._results: dict[int, RoundResult] = {}  # the last results without their values, by version
        self._first_result = 2**62  # the oldest version whose values every shard still has

    # -- messages and time in ------------------------------------------------------------------

    def receive(self, message: Join | Leave, now: float) -> Decisions:
        """Handle a message from a site, other than a push.

        Args:
            message: what has come.
            now: the time.

        Returns:
            The messages to send, and what has happened.

        Raises:
            ProtocolError: the site is ahead of the server.
        """
        del now
        out = Decisions()
        if isinstance(message, Leave):
            self.members.leave(message.site)
        else:
            self._receive_join(message, out)
        return out

    def operate(self, operation: Operation, now: float) -> Decisions:
        """Do what the operator of the run asks for.

        Args:
            operation: what.
            now: the time.

        Returns:
            The messages to send.

        Raises:
            ProtocolError: it concerns a site that has never joined.
        """
        out = Decisions()
        action, site = operation.action, operation.site
        if action is Action.PAUSE:
            if self.pause.begin(now):
                out.messages += [(name, messages.Pause(paused=True)) for name in self.members.listening]
        elif action is Action.RESUME:
            if self.pause.on:
                out.messages += [(name, messages.Pause(paused=False)) for name in self.members.listening]
            seconds = self.pause.end(now)
            for opened in self._rounds.values():
                opened.opened_at += seconds  # or the missing sites would be lost for the time of the pause
        else:
            self.members.check_known(site)
            change = {Action.REMOVE: self.members.leave, Action.SET_ASIDE: self.members.set_aside}
            change.get(action, self.members.take_back)(site)
        return out

    def wake(self, now: float) -> Decisions:
        """Handle the deadlines that have expired; to be called at the time that `next_wake` returned."""
        out = Decisions()
        if self._rounds and not self.pause.on:
            oldest = self._rounds[min(self._rounds)]
            missing = oldest.missing_from(self.members.awaited)
            if self._deadlines.holds_back(oldest, now):
                oldest.overdue_reported = True
                out.held_back = missing
            if self._deadlines.is_lost(oldest, now):
                out.aside += [name for name in missing if self.members.lose(name)]
                out.lost = missing
        return out

    def next_wake(self) -> float | None:
        """When the next deadline expires if nothing comes before, or None if no round is open."""
        if not self._rounds or self.pause.on:
            return None
        return self._deadlines.next_wake(self._rounds[min(self._rounds)])

    def timeout(self) -> float | None:
        """Seconds after which a missing site is lost, or None to wait forever."""
        return self._deadlines.timeout()

    def overdue(self, now: float) -> bool:
        """Whether the oldest open round has been open five times as long as usual; never while the run is paused."""
        if self.pause.on or not self._rounds:
            return False
        return self._deadlines.is_overdue(self._rounds[min(self._rounds)], now)

    def waiting(self, now: float) -> Waiting | None:
        """For whom the oldest open round waits, and how long it has; None if no round is open, or misses nobody."""
        if self.pause.on or not (missing := self.waits_for()):
            return None
        number = min(self._rounds)
        pushed = {name: self.members.by_name[name].pushed_round for name in missing}
        seconds = max(0, int(now - self._rounds[number].opened_at))
        return Waiting(round=number, seconds=seconds, missing=pushed)

    def stuck(self, now: float) -> bool:
        """Whether the oldest open round should have closed long ago, with or without the sites that it misses."""
        if not self._rounds or self.pause.on or self._deadlines.timeout() is None:
            return False
        return now - self._rounds[min(self._rounds)].opened_at > 2 * (self._deadlines.timeout() or 0.0) + 60.0

    def waits_for(self) -> list[str]:
        """The sites that the oldest open round misses, sorted."""
        return sorted(self._rounds[min(self._rounds)].missing_from(self.members.awaited)) if self._rounds else []

    @property
    def down(self) -> Codec:
        """The codec of the next result."""
        return self.plan.down if self.controller is None else codecs.parse(self.controller.now.down)

    # -- pushes in -----------------------------------------------------------------------------

    def expects(self, push: Push, out: Decisions) -> bool:
        """Whether a push is to be taken into a round, with `receive_push`.

        Args:
            push: the push; its values are not looked at.
            out: gets the messages to send, whether the push is taken or not.
        """
        if push.site not in self.members.by_name:
            # It joined after the checkpoint that this server was restored from.
            out.messages.append((push.site, ServerRestarted()))
            return False
        member = self.members.by_name[push.site]
        if not member.live and not member.done:
            self._reply_to(self.members.join(push.site), push.seen, out)
        if push.round <= member.pushed_round:
            return False  # sent again, and received already
        if push.after > member.pushed_round:
            self._reply_to(member, push.seen, out)  # the push before it was lost: both must come again, in order
            return False
        return True

    def check_push(self, push: Push) -> None:
        """Refuse a push with numbers that no site can have, before anything is done or written because of it.

        Args:
            push: the push; its values are not looked at.

        Raises:
            ProtocolError: a number is beyond what the consistency and the trigger allow.
        """
        plan, who = self.plan, f"{push.site} pushes for round {push.round}"
        member = self.members.by_name.get(push.site)
        pushed = 0 if member is None else member.pushed_round
        limit = max(pushed, self._last_closed) + (_AHEAD_ALONE if plan.consistency.alone else plan.rounds_ahead)
        if not plan.consistency.alone:
            limit = min(limit, self._last_closed + plan.most_waiting)
        if push.round > limit:
            raise ProtocolError(
                f"{who}, and the server has closed round {self._last_closed}: with {plan.consistency.word} it cannot "
                f"be further than {limit}; restart the site from its checkpoint"
            )
        most = plan.steps_a_round * (max(push.round, self._last_closed + 1) + 1 + plan.rounds_ahead)
        if push.step > most:
            raise ProtocolError(
                f"{who} at step {push.step}; with at most {plan.steps_a_round:g} steps from one round to the next "
                f"it cannot be past step {most:g}; restart the site from its checkpoint"
            )
        if push.rate is not None and push.rate > self.most_rate:
            raise ProtocolError(
                f"{who} with a learning rate of {push.rate:g}; the server takes at most {self.most_rate:g}, a hundred "
                "times that of its recipe"
            )

    def is_open(self, site: str, round_: int) -> bool:
        """Whether a push is in a round that has not closed."""
        return any((site, round_) in opened.facts for opened in self._rounds.values())

    def receive_push(self, push: Push, facts: PushFacts, size: int, now: float, out: Decisions) -> None:
        """Take a push into its round; all shards have its values.

        Args:
            push: the push, which `expects` has let through.
            facts: what the shards found out about its values, of all of them together.
            size: its bytes on the wire.
            now: the time.
            out: gets the messages to send, and what has happened.
        """
        member = self.members.by_name[push.site]
        alone = self.plan.consistency.alone
        number = self._last_closed + 1 if alone else max(push.round, self._last_closed + 1)
        if number not in self._rounds:
            self._open_round(number, push.site, now, out)
        self._links.receive(push)
        late = push.round < number and push.seen < self.version
        opened = self._rounds[number]
        refusal = None if self._guard is None else self._guard.problem(push, facts)
        if refusal is not None:
            opened.refused[push.site, push.round] = refusal
            out.refused.append((push.site, refusal))
            push = replace(push, buffers={})
        opened.receive(push, now, nbytes=size, late=late, facts=facts)
        member.pushed_round = push.round
        member.done = push.final  # a site that had left and pushes again is awaited again
        member.loading = False

    def _weight(self, push: Push) -> float:
        """The weight of a push, by its samples and its staleness."""
        return self._agreed.weight(push) * self.plan.consistency.weight(self.version - push.seen)

    def _judge(self, closing: OpenRound, rate: float | None) -> None:
        """Let the guard compare the pushes of a round with each other and with what is usual."""
        if self._guard is None:
            return
        found = [
            Weighed(push, math.sqrt(closing.facts[push.site, push.round].squares), self._weight(push))
            for push in sorted(closing.pushes, key=lambda push: (push.site, push.round))
            if (push.site, push.round) not in closing.refused
        ]
        plausible = self.first_norm if rate is None else self.first_norm / rate if rate > 0 else math.inf
        credit = CREDIT["updates" if rate is None else "gradients"]
        closing.verdict = self._guard.judge(found, plausible, credit=credit)
        closing.refused |= closing.verdict.refused

    def _limited(self, pushes: tuple[ClosedPush, ...], closing: OpenRound) -> tuple[ClosedPush, ...]:
        """Weigh down the pushes that are larger than the guard or the aggregator's limit allows."""
        limit = self.plan.aggregator.limit
        norms = {push: math.sqrt(closing.facts[push.site, push.round].squares) for push in pushes if push.counts}
        usual = limit * statistics.median_low([norm for norm in norms.values() if norm > 0] or [0.0])
        scales = {push: closing.verdict.scales.get((push.site, push.round), 1.0) for push in pushes}
        if usual > 0:
            scales |= {push: min(scales[push], usual / norm) for push, norm in norms.items() if norm > 0}
        return tuple(
            replace(push, weight=push.weight * scale, scale=scale) if scale < 1 else push
            for push, scale in scales.items()
        )

    # -- rounds --------------------------------------------------------------------------------

    def _open_round(self, number: int, sender: str, now: float, out: Outbox) -> None:
        self._rounds[number] = OpenRound(opened_at=now)
        if self.plan.calls and not self.plan.consistency.alone:
            for name in self.members.awaited:
                if name != sender and self.members.by_name[name].pushed_round < number:
                    out.messages.append((name, RoundRequest(round=number)))

    def next_order(self) -> CloseOrder | None:
        """The order to close the oldest open round, if it is complete. Until `round_closed`, there is no other."""
        if self._closing is not None or not self._rounds or self.pause.on:
            return None
        number = min(self._rounds)
        if not self._may_close(self._rounds[number]):
            return None
        closing = self._rounds.pop(number)
        self._closing = number, closing
        senders = sorted(closing.pushes, key=lambda push: (push.site, push.round))
        self._agreed.take(senders)
        rate = self._agreed.rate(senders, alone=self.plan.consistency.alone)
        self._judge(closing, rate)
        pushes = tuple(
            ClosedPush(
                site=push.site,
                round=push.round,
                weight=0.0 if (push.site, push.round) in closing.refused else self._weight(push),
                seen=push.seen,
                counts=closing.counts(push),
            )
            for push in senders
        )
        pushes = self._limited(pushes, closing)
        lossy = not isinstance(self.down, Fp32)
        relays = len(self.members.by_name) <= self.plan.relay and not self._has_residual and lossy and self.aligned
        sent = any(push.counts for push in pushes)
        # A site whose push was refused must not fill it in again.
        told_all = closing.rejoined | {push.site for push in pushes if not push.counts}
        self._has_residual = self._has_residual or (lossy and sent and not relays)
        return CloseOrder(
            result=RoundResult(
                version=self.version + 1,
                round=number,
                step=max([self.step, *(one.step for one in senders if (one.site, one.round) not in closing.refused)]),
                included=dict(closing.included),
                rate=rate if sent else None,
                options=self._agreed.options(senders) if sent else (),
            ),
            pushes=pushes,
            weight=self._total_weight(closing, sum(push.weight for push in pushes)),
            down=None if self.controller is None else self.controller.now.down,
            relays=relays,
            last=not self.members.training,
            compares=self.controller is not None and self.controller.compares(number),
            sites=len(self.members.by_name),
            receivers={name: relays and name not in told_all for name in self.members.listening},
        )

    def _may_close(self, opened: OpenRound) -> bool:
        if self.plan.consistency.alone:
            return True
        # Those that have finished wait for nobody either, so they count.
        may_miss = min(self.plan.consistency.missing, len(self.members.listening) - 1)
        return opened.is_complete(self.members.awaited, may_miss=may_miss)

    def _total_weight(self, closing: OpenRound, weight: float) -> float:
        """Where a round does not contain a push of every site, divide the sum by what a full round would weigh."""
        if self.plan.consistency.alone:
            return self.plan.consistency.divisor(len(self.members.listening))
        if self.plan.consistency.missing and closing.late_senders == closing.senders:
            # Late pushes only: the others have finished, and what comes after them has no more than its share.
            return max(weight, float(len(self.members.by_name)))
        return weight

    def round_closed(self, order: CloseOrder, parts: Sequence[ClosedPart], now: float) -> Decisions:
        """All shards have closed a round: count it, and make the result and its messages.

        Args:
            order: what `next_order` returned.
            parts: what each shard has made of it.
            now: the time.

        Returns:
            The result for every site, and what has happened.
        """
        assert self._closing is not None
        (number, closing), self._closing = self._closing, None
        out = Decisions()
        result = join_result(order.result, [part.result for part in parts])
        decision, signs = self._decide(parts, relayed=order.relays, rate=order.result.rate)
        schedule = decision.schedule if decision is not None else None
        result = replace(result, schedule=schedule, buffers=self._combined_buffers(closing))
        messages = {name: result.without(name) if own else result for name, own in order.receivers.items()}
        sizes = {
            name: nbytes(_header(message)) + sum(part.sizes.get(name, 0) for part in parts)
            for name, message in messages.items()
        }
        self._links.round_closed(closing, sizes, now, sites=len(self.members.by_name))
        self.version, self.step, self._last_closed = result.version, result.step, number
        self._deadlines.round_closed(now - closing.opened_at)
        for name, round_ in closing.included.items():
            self.members.by_name[name].included_round = round_
        if result.buffers:  # those of before are of no use to anybody
            self._results |= {one: replace(past, buffers={}) for one, past in self._results.items() if past.buffers}
        for push in closing.pushes:
            refused = (push.site, push.round) in closing.refused
            if not refused:
                self.members.included(push.site)
            elif self.members.fault(push.site):
                out.aside.append(push.site)
        out.refused += [(site, why) for (site, _), why in closing.verdict.refused.items()]
        out.limited += [(site, why) for (site, _), why in closing.verdict.limited.items()]
        self._results[result.version] = _header(result)
        self._first_result = max(part.first_result for part in parts)
        while len(self._results) > _HEADERS or min(self._results) < min(self._first_result, result.version):
            del self._results[min(self._results)]
        out.messages += messages.items()
        out.closed.append(
            ClosedRound(
                result=result,
                senders=sorted(closing.senders),
                pushes=[(push.site, push.round) for push in closing.pushes],
                up_bytes=closing.up_bytes,
                down_bytes=max(sizes.values(), default=0),
                digest=f"{sum(part.digest for part in parts) % 2**64:016x}",
                decision=decision,
                signs=signs,
            )
        )
        return out

    def _combined_buffers(self, closing: OpenRound) -> Mapping[str, Tensor]:
        """The buffers of all sites that count, if a push of this round has brought some."""
        brought = [
            push
            for push in sorted(closing.pushes, key=lambda push: push.round)
            if push.buffers and (push.site, push.round) not in closing.refused
        ]
        for push in brought:
            self.buffers.take(push.site, push.samples, push.buffers)
        members = self.members.by_name.values()
        return self.buffers.combine(one.name for one in members if one.live or one.done) if brought else {}

    def _decide(
        self, parts: Sequence[ClosedPart], *, relayed: bool, rate: float | None
    ) -> tuple[Decision | None, Signs | None]:
        """A new sync schedule, if the controller of `auto` wants one, and how alike the pushes were."""
        if self.controller is None:
            return None, None
        compared = [part.signs for part in parts if part.signs is not None]
        signs = Signs(sum(s.common for s in compared), sum(s.same for s in compared)) if compared else None
        if signs is not None:
            self.controller.compare(signs)
        return self.controller.decide(self.members.awaited, relayed=relayed, rate=rate), signs

    # -- membership ----------------------------------------------------------------------------

    def _receive_join(self, join: Join, out: Decisions) -> None:
        if join.version > self.version:
            raise ProtocolError(
                f"{join.site!r} has global model version {join.version}, the server only {self.version}: "
                "the server was restored from an older checkpoint; restore the sites from the same one"
            )
        for opened in self._rounds.values():
            if join.site in opened.senders:
                opened.rejoined.add(join.site)
        if self.pause.on:
            out.messages.append((join.site, messages.Pause(paused=True)))
        version = join.version
        if join.digest is not None:
            version = 0 if join.digest == self.first_digest else -1
        known = self.members.by_name.get(join.site)
        if known is not None and known.loading and known.loads == (join.epoch, join.version):
            # Its download is complete. What it has missed meanwhile it has been sent, or it might load for ever.
            self._reply_to(self.members.join(join.site), self.version, out)
            return
        self._reply_to(
            self.members.join(join.site), version, out, join.download_codec, epoch=join.epoch, training=join.training
        )

    def forget_connections(self) -> None:
        """After a restart: nobody has been sent anything."""
        for member in self.members.by_name.values():
            member.loads = None

    def _reply_to(
        self,
        member: Member,
        version: int,
        out: Decisions,
        download_codec: str | None = None,
        *,
        epoch: int | None = None,
        training: bool = False,
    ) -> None:
        """Tell a site the way to the present global model: by the results it missed, or by a download."""
        missed = range(version + 1, self.version + 1)
        known = (
            version >= 0
            and all(one in self._results for one in missed)
            and version + 1 >= min(self._first_result, self.version + 1)
        )
        codec = None if known or download_codec is None else check_download_codec(download_codec)
        if isinstance(codec, Fp32) or self.elsewhere:
            codec = None  # it is exact: nothing has to be sent after it
        first = self.elsewhere and not known  # it is sent the first global model, and all results since
        if first and not self._remembers_all:
            member.live = False  # nobody waits for it
            raise ProtocolError(
                f"{member.name} needs the global model of version {self.version}, and the server does not have it: the "
                "sites step with an optimizer that the server cannot make, and it remembers too few of their gradients "
                "to begin with the first. Give the site the state of another one (Site.state_dict), or start the "
                "server with --optimizer MODULE:CLASS"
            )
        reply = JoinReply(
            version=0 if first else self.version,
            round=self._last_closed + 1,
            step=self.step,
            included=member.included_round,
            pushed=member.pushed_round,
            downloads=not known,
            approximate=codec is not None,
            schedule=None if known or self.controller is None else self.controller.now.schedule,
        )
        member.loading = not known and codec is None and not training
        member.loads = (epoch, reply.version) if member.loading and epoch is not None else None
        results = tuple(self._results[one] for one in missed) if known else ()
        if first:
            results = tuple(self._results[one] for one in range(1, self.version + 1))
        out.downloads.append(Download(site=member.name, epoch=epoch, reply=reply, results=results, codec=codec))

    @property
    def _remembers_all(self) -> bool:
        """Whether every result since the first global model can be sent."""
        return not self.version or (self._first_result <= 1 and len(self._results) == self.version)

    # -- checkpoint ----------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Everything that must survive the end of a round, as named tensors. Open rounds are not part of it."""
        numbers = [self.version, self.step, self._last_closed, int(self._has_residual)]
        found = {"clock": torch.tensor(numbers), **with_prefix("member.", self.members.state())}
        found |= with_prefix("agreed.", self._agreed.state())
        found |= with_prefix("pause.", self.pause.state())
        for version, result in self._results.items():
            if result.schedule is not None:
                found[f"schedule.{version}"] = schedule_to_tensor(result.schedule)
        found |= with_prefix("buffers.", self.buffers.state())
        if self._guard is not None:
            found |= with_prefix("guard.", self._guard.state())
        if self.controller is not None:
            found |= with_prefix("controller.", self.controller.state())
        return found

    def load(self, state: Mapping[str, Tensor], results: Sequence[RoundResult] = ()) -> None:
        """Restore what `state` returned; open rounds are forgotten, their pushes come again.

        Args:
            state: the named tensors.
            results: the last results up to the version of the checkpoint, as far as all shards still have their values.
        """
        self.version, self.step, self._last_closed, residual = (int(number) for number in state["clock"])
        self._has_residual = bool(residual)
        self._agreed.load(without_prefix("agreed.", state))
        self.pause.load(without_prefix("pause.", state))
        self.buffers.load(without_prefix("buffers.", state))
        if self._guard is not None:
            self._guard.load(without_prefix("guard.", state))
        if self.controller is not None:
            self.controller.load(without_prefix("controller.", state))
        self._rounds, self._closing = {}, None
        self._links.clear()
        self.members = Members()
        self.members.load(without_prefix("member.", state))
        schedules = without_prefix("schedule.", state)
        self._results = {}
        for result in results:
            saved = schedules.get(str(result.version))
            schedule = None if saved is None else schedule_from_tensor(saved)
            self._results[result.version] = replace(_header(result), schedule=schedule)
        self._first_result = min(self._results, default=2**62)

    def lost_since_checkpoint(self) -> list[str]:
        """After `load`: the sites that are to join again, lost ones too."""
        return [member.name for member in self.members.by_name.values() if member.live or not member.done]


def facts_of_all(parts: Iterable[PushFacts]) -> PushFacts:
    """What all shards together have found about one push."""
    facts = list(parts)
    problem = next((one.problem for one in facts if one.problem is not None), None)
    return PushFacts(squares=sum(one.squares for one in facts), numel=sum(one.numel for one in facts), problem=problem)


def join_result(header: RoundResult, parts: Sequence[RoundResult]) -> RoundResult:
    """A result with the values that the shards have made, as far as they are in this process."""
    if len(parts) == 1:
        return replace(header, segments=parts[0].segments, relayed=parts[0].relayed)
    segments = sorted((one for part in parts for one in part.segments), key=lambda one: one.start)
    return replace(header, segments=tuple(segments), relayed=merge_relayed(part.relayed for part in parts))


def _header(result: RoundResult) -> RoundResult:
    header = without_values(result)
    assert isinstance(header, RoundResult)
    return header

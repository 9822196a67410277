"""The global server as a state machine: messages and the time go in, messages and the next deadline come out.

A round opens with its first push (`_open_round`). It closes when every awaited site has pushed; with `backup(b)`, when
all but b of them have pushed for this very round (`_close_ready_rounds`). Rounds close in order. Closing
(`_close_round`) aggregates the pushes, encodes the result with the server's own error feedback, moves the server's
global model by what the sites will decode, and sends the result to every site.

Deadlines: a site that is missing `t_local` seconds after a round opened is reported as holding the others back; after
`t_global` seconds it is lost, and the round closes without it. A push is included once, by (site, round); one that
comes after its round has closed goes into the round that is open.

A checkpoint taken after a round has closed is all the durable state there is: sites send the pushes of open rounds
again. The parts: `open_round` (accumulation), `result_encoder` (error feedback and relay), `membership` (sites and
replies to joins), `round_timing` (deadlines and links), `delay_compensation`, `guard`, `controller` (`auto`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weightgrad.codecs import Codec
from weightgrad.core.aggregators import Aggregator
from weightgrad.core.agreement import Agreement, Signs
from weightgrad.core.consistency import Consistency
from weightgrad.core.controller import Auto, Controller, Decision
from weightgrad.core.delay_compensation import DelayCompensation
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.guard import Guard
from weightgrad.core.membership import JoinReplies, Member, Members
from weightgrad.core.open_round import ClosedRound, OpenRound, Outbox
from weightgrad.core.result_encoder import ResultEncoder
from weightgrad.core.result_log import MemoryResultLog, ResultLog
from weightgrad.core.round_timing import LinkObserver, RoundDeadlines
from weightgrad.core.selectors import Selector
from weightgrad.core.vector_checks import with_prefix, without_prefix
from weightgrad.errors import ProtocolError
from weightgrad.wire.messages import (
    Join,
    Leave,
    Message,
    Push,
    RoundRequest,
    RoundResult,
    Segment,
    ServerRestarted,
    nbytes,
)

__all__ = ["ClosedRound", "Outbox", "ServerState", "ServerStrategy"]


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
    auto: Auto | None = None  # the server sets the sync schedule
    relay: int = 0  # with so many sites or fewer, pushes are relayed as they came


class ServerState:
    """The state of the global server, for all sites.

    Memory, in vectors of the model's size: the global model (and its optimizer's state where gradients are shared),
    the residual of `ResultEncoder`, the aggregator's memory, one sum in each `OpenRound` (reused by the next), and the
    past models of `DelayCompensation`. The result log holds encoded results, by default as many as one model's bytes.

    Args:
        global_model: the server's replica of the global model, which the state owns from now on.
        plan: the server's parts of the strategy.
        key: the key of the random streams of the server's codecs.
        guard: checks every push; a push that it refuses counts as empty, and its round closes all the same.
        log: keeps the last results for sites that were away; None keeps them in memory.
    """

    def __init__(
        self,
        global_model: GlobalModel,
        plan: ServerStrategy,
        key: int,
        guard: Guard | None = None,
        log: ResultLog | None = None,
    ) -> None:
        self.global_model = global_model
        self.members = Members()
        self.controller = Controller(plan.auto, global_model.layout.numel) if plan.auto is not None else None
        self._plan = plan
        self._guard = guard
        self._log: ResultLog = MemoryResultLog(4 * global_model.layout.numel) if log is None else log
        self._encoder = ResultEncoder(
            global_model,
            down=plan.down,
            selector=plan.down_selector,
            flush=plan.flush,
            controller=self.controller,
            key=key,
            per_tensor=plan.per_tensor,
            keep_loss=plan.keep_loss,
            relay_limit=plan.relay,
        )
        self._replies = JoinReplies(global_model, self._log, key)
        self._deadlines = RoundDeadlines(t_local=plan.t_local, t_global=plan.t_global, adapts=plan.adapts)
        self._links = LinkObserver(self.controller)
        self._delay_compensation = DelayCompensation(global_model, plan.consistency.compensation)
        self._aggregator_state: dict[str, Tensor] = {}
        self._rounds: dict[int, OpenRound] = {}  # the open rounds, by number
        self._spare_sum: Tensor | None = None  # memory of the last closed round, for the next one
        self._last_closed = 0  # the number of the last closed round
        self._samples: int | None = None  # of the first push: the unit of weights
        self._delay_compensation.record_model(sites=0)

    # -- messages and time in ------------------------------------------------------------------

    def receive(self, message: Message, now: float) -> Outbox:
        """Handle a message from a site.

        Args:
            message: what has come.
            now: the time.

        Returns:
            The messages to send, and what has happened.

        Raises:
            ProtocolError: the message is one that only sites receive, or the site is ahead of the server.
        """
        out = Outbox()
        if isinstance(message, Push):
            self._receive_push(message, now, out)
        elif isinstance(message, Join):
            self._receive_join(message, out)
        elif isinstance(message, Leave):
            self.members.leave(message.site)
        else:
            raise ProtocolError(f"the global server was sent a {type(message).__name__}, which only sites receive")
        self._close_ready_rounds(now, out)
        return out

    def wake(self, now: float) -> Outbox:
        """Handle the deadlines that have expired; to be called at the time that `next_wake` returned."""
        out = Outbox()
        if self._rounds:
            oldest = self._rounds[min(self._rounds)]
            missing = oldest.missing_from(self.members.awaited)
            if self._deadlines.holds_back(oldest, now):
                oldest.overdue_reported = True
                out.held_back = missing
            if self._deadlines.is_lost(oldest, now):
                for name in missing:
                    self.members.lose(name)
                out.lost = missing
        self._close_ready_rounds(now, out)
        return out

    def next_wake(self) -> float | None:
        """When the next deadline expires if nothing comes before, or None if no round is open."""
        return self._deadlines.next_wake(self._rounds[min(self._rounds)]) if self._rounds else None

    def timeout(self) -> float | None:
        """Seconds after which a missing site is lost, or None to wait forever."""
        return self._deadlines.timeout()

    def overdue(self, now: float) -> tuple[int, list[str]] | None:
        """The oldest open round and the sites it misses, if it has been open five times as long as usual."""
        if not self._rounds or not self._deadlines.is_overdue(self._rounds[min(self._rounds)], now):
            return None
        return min(self._rounds), self.waits_for()

    def waits_for(self) -> list[str]:
        """The sites that the oldest open round misses, sorted."""
        return sorted(self._rounds[min(self._rounds)].missing_from(self.members.awaited)) if self._rounds else []

    @property
    def down(self) -> Codec:
        """The codec of the next result."""
        return self._encoder.down

    # -- pushes in -----------------------------------------------------------------------------

    def _receive_push(self, push: Push, now: float, out: Outbox) -> None:
        if push.site not in self.members.by_name:
            # It joined after the checkpoint that this server was restored from.
            out.messages.append((push.site, ServerRestarted()))
            return
        member = self.members.by_name[push.site]
        if not member.live and not member.done:
            self._reply_to(self.members.join(push.site), push.seen, out)
        if push.round <= member.pushed_round:
            return  # sent again, and received already
        if push.after > member.pushed_round:
            self._reply_to(member, push.seen, out)  # the push before it was lost: both must come again, in order
            return
        alone = self._plan.consistency.alone
        number = self._last_closed + 1 if alone else max(push.round, self._last_closed + 1)
        if number not in self._rounds:
            self._open_round(number, push.site, now, out)
        self._links.receive(push)
        opened = self._rounds[number]
        late = push.round < number and push.seen < self.global_model.version
        opened.receive(self._checked(push, out), now, nbytes=nbytes(push), late=late)
        member.pushed_round = push.round
        member.done = push.final  # a site that had left and pushes again is awaited again
        opened.accumulate(opened.missing_from(self.members.awaited), self._weigh, relays=self._relays)

    def _checked(self, push: Push, out: Outbox) -> Push:
        """The push, or an empty one in its place if the guard refuses it."""
        reason = None if self._guard is None else self._guard.check(push, self.global_model.layout.numel)
        if reason is None:
            return push
        out.refused.append((push.site, reason))
        return replace(push, segments=())

    def _weigh(self, push: Push) -> tuple[float, tuple[Segment, ...]]:
        """The weight of a push by its samples and its staleness, and its segments after delay compensation."""
        if self._samples is None:
            self._samples = max(push.samples, 1)
        staleness = self.global_model.version - push.seen
        weight = push.samples / self._samples * self._plan.consistency.weight(staleness)
        return weight, self._delay_compensation.compensate(push)

    @property
    def _relays(self) -> bool:
        return self._encoder.relays(len(self.members.by_name))

    # -- rounds --------------------------------------------------------------------------------

    def _open_round(self, number: int, sender: str, now: float, out: Outbox) -> None:
        numel = self.global_model.layout.numel
        compares = self.controller is not None and self.controller.compares(number)
        self._rounds[number] = OpenRound(
            opened_at=now,
            accumulator=self._plan.aggregator.open(numel, self._spare_sum),
            agreement=Agreement(numel) if compares else None,
        )
        self._spare_sum = None
        if self._plan.calls and not self._plan.consistency.alone:
            for name in self.members.awaited:
                if name != sender and self.members.by_name[name].pushed_round < number:
                    out.messages.append((name, RoundRequest(round=number)))

    def _close_ready_rounds(self, now: float, out: Outbox) -> None:
        """Close the oldest open rounds, in order, as long as they are complete."""
        while self._rounds and self._may_close(self._rounds[min(self._rounds)]):
            self._close_round(min(self._rounds), now, out)

    def _may_close(self, opened: OpenRound) -> bool:
        if self._plan.consistency.alone:
            return True
        # Those that have finished wait for nobody either, so they count.
        may_miss = min(self._plan.consistency.missing, len(self.members.listening) - 1)
        return opened.is_complete(self.members.awaited, may_miss=may_miss)

    def _close_round(self, number: int, now: float, out: Outbox) -> None:
        """Aggregate the pushes of a round, move the global model, and send the result to every site."""
        closing = self._rounds.pop(number)
        closing.accumulate([], self._weigh, relays=self._relays)
        self._set_total_weight(closing)
        sent = closing.accumulator.intervals()
        update = self._plan.aggregator.close(closing.accumulator, self._aggregator_state)
        all_relayed = self._relays and closing.relays_all
        relayed = tuple(closing.relayed) if all_relayed and sent else ()
        last = not self.members.awaited
        segments = () if relayed else self._encoder.encode(update, sent, number, last=last)
        self._spare_sum = closing.accumulator.total
        decision, signs = self._decide(closing, relayed=all_relayed)
        result = RoundResult(
            version=self.global_model.version + 1,
            round=number,
            step=max(closing.step, self.global_model.step),
            segments=segments,
            included=dict(closing.included),
            rate=closing.rate,
            schedule=decision.schedule if decision is not None else None,
            relayed=relayed,
        )
        messages = {
            name: result.without(name) if relayed and name not in closing.rejoined else result
            for name in self.members.listening
        }
        self._links.round_closed(closing, result, messages, now, sites=len(self.members.by_name))
        self.global_model.apply(result, update)
        self._delay_compensation.record_model(sites=len(self.members.by_name))
        self._last_closed = number
        self._deadlines.round_closed(now - closing.opened_at)
        for name, round_ in closing.included.items():
            self.members.by_name[name].included_round = round_
        self._log.append(result)
        out.messages += messages.items()
        out.closed.append(
            ClosedRound(
                result=result,
                senders=sorted(closing.senders),
                pushes=closing.pushes,
                up_bytes=closing.up_bytes,
                down_bytes=max((nbytes(message) for message in messages.values()), default=0),
                digest=self.global_model.digest(),
                decision=decision,
                signs=signs,
            )
        )

    def _set_total_weight(self, closing: OpenRound) -> None:
        """Where a round does not contain a push of every site, divide the sum by what a full round would weigh."""
        accumulator = closing.accumulator
        if self._plan.consistency.alone:
            # One push of so many: it moves the global model by its share.
            accumulator.weight = float(max(1, len(self.members.listening)))
        elif self._plan.consistency.missing and closing.late_senders == closing.senders:
            # Late pushes only: the others have finished, and what comes after them has no more than its share.
            accumulator.weight = max(accumulator.weight, float(len(self.members.by_name)))

    def _decide(self, closing: OpenRound, *, relayed: bool) -> tuple[Decision | None, Signs | None]:
        """A new sync schedule, if the controller of `auto` wants one, and how alike the pushes were."""
        if self.controller is None:
            return None, None
        signs = None if closing.agreement is None else closing.agreement.signs()
        if signs is not None:
            self.controller.compare(signs)
        return self.controller.decide(self.members.awaited, relayed=relayed), signs

    # -- membership ----------------------------------------------------------------------------

    def _receive_join(self, join: Join, out: Outbox) -> None:
        if join.version > self.global_model.version:
            raise ProtocolError(
                f"{join.site!r} has global model version {join.version}, the server only {self.global_model.version}: "
                "the server was restored from an older checkpoint; restore the sites from the same one"
            )
        for opened in self._rounds.values():
            opened.rejoined.add(join.site)
        self._reply_to(self.members.join(join.site), join.version, out, join.download_codec)

    def _reply_to(self, member: Member, version: int, out: Outbox, download_codec: str | None = None) -> None:
        reply = self._replies.reply(
            member,
            version=version,
            next_round=self._last_closed + 1,
            schedule=self.controller.now.schedule if self.controller is not None else None,
            download_codec=download_codec,
        )
        out.messages.append((member.name, reply))

    # -- checkpoint ----------------------------------------------------------------------------

    def checkpoint(self) -> dict[str, Tensor]:
        """Copies of everything the server needs to go on after the last closed round, as named tensors."""
        found = with_prefix("global_model.", self.global_model.snapshot())
        found |= with_prefix("result_residual.", self._encoder.state())
        found |= with_prefix("aggregator.", {name: tensor.clone() for name, tensor in self._aggregator_state.items()})
        found |= with_prefix("member.", self.members.state())
        numbers = [self.global_model.version, self.global_model.step, self._last_closed, self._samples or 0]
        found["clock"] = torch.tensor(numbers)
        if self._guard is not None:
            found |= with_prefix("guard.", self._guard.state())
        if self.controller is not None:
            found |= with_prefix("controller.", self.controller.state())
        return found

    def restore(self, state: Mapping[str, Tensor]) -> Outbox:
        """Become the server of a checkpoint.

        Args:
            state: the named tensors of a checkpoint of the same model and strategy.

        Returns:
            Messages that ask every site, lost ones too, to join again.
        """
        version, step, self._last_closed, samples = (int(number) for number in state["clock"])
        self._samples = samples or None
        self.global_model.restore(without_prefix("global_model.", state), version, step)
        self._encoder.load(without_prefix("result_residual.", state))
        self._aggregator_state = {name: tensor.clone() for name, tensor in without_prefix("aggregator.", state).items()}
        if self._guard is not None:
            self._guard.load(without_prefix("guard.", state))
        if self.controller is not None:
            self.controller.load(without_prefix("controller.", state))
        self._rounds = {}
        self._links.clear()
        self._delay_compensation.clear()
        self._log.restart(version)
        self._delay_compensation.record_model(sites=len(self.members.by_name))
        self.members = Members()
        self.members.load(without_prefix("member.", state))
        waiting = [member.name for member in self.members.by_name.values() if member.live or not member.done]
        return Outbox([(name, ServerRestarted()) for name in waiting])

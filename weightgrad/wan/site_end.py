"""A site's end of the WAN as a state machine: steps, messages and the time in, messages out.

After each local step the driver calls `stepped`; before each it calls `settle`, which applies the
answers that have come, and asks `blocked`. The model the site trains on is `model`, one flat vector:
with strategies that share gradients it is the base itself, otherwise it is

    model = base + what is in flight + what was done since the last round (+ what is held),

of what is in flight and of what is held as much as `resume` says.

Conservation: what was taken by the server + in flight + held + done since = all local updates.

A site that comes late may be sent its first base through a codec. It trains on that at once and asks for the exact
base beside; until that has come its own base is not `exact`, the one exception to "the same bits everywhere".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weightgrad import codecs
from weightgrad.codecs import Codec
from weightgrad.errors import ProtocolError
from weightgrad.kernels import fixed
from weightgrad.wan import encoded_snapshot
from weightgrad.wan.base import Base
from weightgrad.wan.consistency import Consistency
from weightgrad.wan.message_bytes import pack, unpack
from weightgrad.wan.messages import Answer, Call, Join, Message, Part, Push, Restarted, Welcome
from weightgrad.wan.outbound import Outbound
from weightgrad.wan.pace import Pace, Stopwatch, pace_tensor, tensor_pace
from weightgrad.wan.resume import Resume
from weightgrad.wan.selectors import All, Selector
from weightgrad.wan.triggers import DynamicThreshold, Moment, Significance, Trigger


@dataclass(frozen=True, kw_only=True)
class SitePlan:
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
    t: float | None = None
    pace: Pace | None = None  # to begin with, where the server sets it


@dataclass
class _Flight:
    push: Push
    sent_at: float


class SiteEnd:
    """One a site. `first_base` is the codec to be sent the base in, should it come late; None: exactly."""

    def __init__(
        self, name: str, base: Base, plan: SitePlan, samples: int, key: int, *, first_base: str | None = None
    ) -> None:
        self.name = name
        self.base = base
        self.plan = plan
        self.step = 0  # local steps done
        self.rate: float | None = None  # to be told with shared gradients, where the server does not know it
        self.pending = Outbound(base.layout, plan.up, key, per_tensor=plan.per_tensor, keep_loss=plan.keep_loss)
        self.model = base.vector if plan.shares_gradients else base.vector.clone()
        self._mark = base.vector if plan.shares_gradients else base.vector.clone()
        self._samples = samples
        self._flights: list[_Flight] = []
        self._inbox: dict[int, Answer] = {}
        self._round = 0  # the last round pushed for, or known to be over
        self._pushed = 0  # the last round pushed for
        self._again_until = 0  # pushes up to this one are known to the server, and made again after a restart
        self._sent_step = 0  # when something was last sent
        self._round_step = 0  # when the last round began
        self._present: tuple[int, int] | None = None  # where the others are, once that is done
        self._called = 0
        self._heard = 0.0
        self._joined = False
        self._finishing = False
        self._first_base = first_base
        self.exact = True  # whether its base has the bits of the server's at that version
        self.rebases = 0  # how often the whole base has come, and moved the model
        self._dropped = 0  # pushes up to this one are known to the server, and all that was pending then is gone
        self.pace = plan.pace
        self.stopwatch = Stopwatch()
        wants = isinstance(plan.trigger, Significance)
        self.threshold = (
            DynamicThreshold(plan.trigger.threshold, plan.trigger.low, plan.trigger.high)
            if isinstance(plan.trigger, Significance)
            else None
        )
        self._previous = self.model.clone() if (wants or plan.selector.needs_step) else None
        self._step_update: Tensor | None = None
        self._room: Tensor | None = None
        self._done: Tensor | None = None  # shared gradients since something was sent, where a trigger asks
        self.let_go = False  # whether the last step ended with what was held back leaving the model

    # -- membership -------------------------------------------------------------------------

    def join(self, *, same_start: bool = True) -> list[Message]:
        """Ask to be let in, or in again after an absence. Without the same first weights: to be sent them."""
        self._joined = False
        self.exact = self.exact and same_start
        never_in = self.base.version == 0
        return [Join(self.name, self.base.version if self.exact else -1, self._first_base if never_in else None)]

    @property
    def finished(self) -> bool:
        """Everything of its own is in the base, and the base is everybody's."""
        return self._finishing and not self._flights and self.exact

    @property
    def in_flight(self) -> int:
        """Rounds pushed and not answered."""
        return len(self._flights)

    @property
    def pushed(self) -> int:
        """The last round it has pushed for."""
        return self._pushed

    @property
    def overlap(self) -> int:
        """Steps a site goes on while a round is on its way."""
        return self.plan.overlap if self.pace is None else self.pace.overlap

    @property
    def _rounds_under_way(self) -> int:
        """At a time, by the pace; without one it is not asked for."""
        return 1 if self.pace is None else max(1, -(-self.pace.overlap // self.pace.every))

    @property
    def up(self) -> Codec:
        """The codec it speaks with now."""
        return self.plan.up if self.pace is None else codecs.parse(self.pace.up)

    # -- before a step ----------------------------------------------------------------------

    def blocked(self, now: float) -> str | None:
        """Why the workers may not be given weights now, or None."""
        why = self._why_blocked(now)
        if why is None:
            self.stopwatch.begins(now)
        return why

    def _why_blocked(self, now: float) -> str | None:
        if not self._joined:
            return "joining"
        if self._finishing and not self.exact:
            return "exact base"
        if not self._flights:
            return None
        if self._finishing:
            return "flush"
        oldest = self._flights[0].push
        behind = self._round - oldest.round
        if behind >= self.plan.consistency.ahead and self.step - oldest.step >= self.overlap:
            return "answer"
        if self.plan.t is not None and now - max(self._heard, self._flights[0].sent_at) > self.plan.t:
            return "stall"
        return None

    def settle(self) -> list[Answer]:
        """Apply the answers whose turn has come, and say which."""
        applied: list[Answer] = []
        if not self._joined:
            return applied  # only the welcome tells whether they answer pushes that must be made again
        while (answer := self._inbox.get(self.base.version + 1)) is not None:
            own = answer.taken.get(self.name)
            if own is not None and self._pushed < own <= self._again_until:
                break  # it answers a push that is about to be made again
            if own is not None and self.overlap and not self._finishing:
                # It may answer several pushes, of a site that was late: the oldest is what `blocked` waits for.
                due = next((f.push.step for f in self._flights if f.push.round <= own), self.step)
                if self.step < due + self.overlap:
                    break  # not yet: the same step whatever the link was like
            del self._inbox[answer.version]
            answer = self._with_own(answer)
            self._apply(answer)
            applied.append(answer)
        if self._present is not None and self._pushed >= self._again_until:
            self._go_to(self._present)
            self._present = None
        return applied

    def _apply(self, answer: Answer) -> None:
        fresh = None if self.plan.shares_gradients else self._since_mark()
        self.base.apply(answer)
        if answer.pace is not None and self.pace is not None:
            self.pace = answer.pace
        own = answer.taken.get(self.name, -1)
        self._flights = [f for f in self._flights if f.push.round > own]
        if self.plan.consistency.missing:  # the others have gone on without it: it does not do their steps again
            self._go_to((answer.step, self._round))
        if fresh is not None:
            self._place(fresh, answer)

    def _since_mark(self) -> Tensor:
        """What was done since the last push, in a room of its own that the next call uses again."""
        if self._room is None:
            self._room = torch.empty_like(self.model)
        return torch.sub(self.model, self._mark, out=self._room)

    def _place(self, fresh: Tensor, answer: Answer | None) -> None:
        """Put the model where `resume` says; `fresh`, what was done since the last push, stays pending."""
        share = self.plan.resume.own_share
        if share and answer is not None:
            for part in answer.parts:
                here = slice(part.start, part.start + part.payload.numel)
                self.model[here].mul_(share).add_(self.base.vector[here], alpha=1 - share)
            torch.sub(self.model, fresh, out=self._mark)
        else:
            self._mark_place()
            torch.add(self._mark, fresh, out=self.model)
        if self._previous is not None:
            self._previous.copy_(self.model)

    def _mark_place(self) -> None:
        """The base, and as much of what is in flight and of what is held as `resume` says."""
        flying, share = self.plan.resume.flight_share(self._rounds_under_way), self.plan.resume.pending_share
        if flying < 1:  # scaled as one: as many passes over memory as without
            torch.mul(self.pending.held, share / flying, out=self._mark)
            self._add_flights()
            torch.add(self.base.vector, self._mark, alpha=flying, out=self._mark)
            return
        self._mark.copy_(self.base.vector)
        self._add_flights()
        if share:
            self._mark.add_(self.pending.held, alpha=share)

    def _add_flights(self) -> None:
        for flight in self._flights:
            for part in flight.push.parts:
                part.into(self._mark, fixed.ADD)

    # -- after a step -----------------------------------------------------------------------

    def stepped(self, now: float, gradient: Tensor | None = None) -> list[Message]:
        """A local step is done: `model` has moved, or here is the gradient. Maybe a round starts."""
        self.step += 1
        self.let_go = False
        self.stopwatch.ends(now)
        if self._previous is not None:
            if gradient is not None:
                self._step_update = gradient
            elif self._step_update is None:
                self._step_update = self.model - self._previous
            else:
                torch.sub(self.model, self._previous, out=self._step_update)
            self._previous.copy_(self.model)
            if gradient is not None and self.threshold is not None:
                self._done = gradient.clone() if self._done is None else self._done.add_(gradient)
        moment = Moment(
            self.step,
            self.step - self._sent_step,
            self._ratio,
            self.threshold.value if self.threshold else 0.0,
            self.step - self._round_step,
            self.pace.every if self.pace is not None else 0,
        )
        if self._called <= self._round and not self.plan.trigger.fires(moment):
            if gradient is not None:
                self.pending.put(gradient)
            return []
        if not self.plan.trigger.sends(moment):
            if gradient is not None:
                self.pending.put(gradient)
            return [self._begin(now, None, _NOTHING, 0)]
        self._sent_step, self._done, self.let_go = self.step, None, self._lets_go
        push = self._begin(now, self._fresh(gradient), self.plan.selector, self.plan.trigger.fragment(moment))
        if self.let_go:
            self._mark_place()
            self.model.copy_(self._mark)
            if self._previous is not None:
                self._previous.copy_(self.model)
        return [push]

    @property
    def _lets_go(self) -> bool:
        """Whether what a push holds back leaves the model with it, and not only when the answer comes."""
        return self.plan.resume.lets_go and not self.plan.shares_gradients and self.overlap > 0

    def finish(self, now: float) -> list[Message]:
        """Training is over: send all that is pending."""
        self._finishing, self.let_go = True, False
        fresh = self._fresh(None)
        if self.plan.flush is None or not (bool(fresh.any()) or bool(self.pending.held.any())):
            return [self._begin(now, fresh, _NOTHING, 0, final=True)]
        return [self._begin(now, fresh, All(), 0, codec=self.plan.flush, final=True)]

    def new_epoch(self, rate: float) -> None:
        """An epoch has ended, with this learning rate: the dynamic threshold moves."""
        if self.threshold is not None and self._step_update is not None and rate > 0:
            self.threshold.epoch(rate, float(self._step_update.norm()) / rate)

    def _fresh(self, gradient: Tensor | None) -> Tensor:
        if gradient is not None:
            return gradient
        if self.plan.shares_gradients:
            return torch.zeros_like(self.base.vector)
        fresh = self._since_mark()
        if not self.let_go:
            self._mark.copy_(self.model)
        return fresh

    def _ratio(self) -> float:
        """How many times one step's update is what was done since the last round began."""
        assert self._step_update is not None
        one = float(self._step_update.norm())
        done = self._done if self.plan.shares_gradients else self._since_mark()
        assert done is not None
        return float(done.norm()) / one if one > 0 else 0.0

    def _begin(
        self,
        now: float,
        fresh: Tensor | None,
        selector: Selector,
        fragment: int,
        *,
        codec: Codec | None = None,
        final: bool = False,
    ) -> Push:
        self._round += 1  # never past a round it was called to: each waits for its push
        parts: tuple[Part, ...] = ()
        if fresh is not None:
            parts = self.pending.take(
                fresh,
                selector,
                self.base.vector,
                step=self.step,
                count=self._round,
                fragment=fragment,
                step_update=self._step_update,
                threshold=self.threshold.value if self.threshold else 0.0,
                codec=self.up if codec is None and self.pace is not None else codec,
            )
        push = Push(
            self.name,
            self._round,
            self._pushed,
            self.step,
            self.base.version,
            self._samples,
            parts,
            final,
            self.rate,
            self.stopwatch.report() if self.pace is not None else None,
        )
        self._pushed, self._round_step = self._round, self.step
        self._flights.append(_Flight(push, now))
        return push

    # -- messages in ------------------------------------------------------------------------

    def receive(self, message: Message, now: float) -> list[Message]:
        """A message has come. Answers wait for `settle`."""
        self._heard = now
        if isinstance(message, Answer):
            for flight in self._flights:
                if flight.push.round == message.taken.get(self.name):
                    self.stopwatch.answered(flight.push.round, now - flight.sent_at)
            if message.version <= self.base.version:
                return []
            if self._lacks(message):  # it has forgotten a push that the server thinks it has
                return self.join() if self._joined else []
            self._inbox[message.version] = message
            return []
        if isinstance(message, Call):
            self._called = max(self._called, message.round)
            return []
        if isinstance(message, Restarted):
            return self.join()
        if isinstance(message, Welcome):
            return self._welcomed(message, now)
        raise ProtocolError(f"site {self.name!r} was sent {type(message).__name__}, which only the server receives")

    def _lacks(self, answer: Answer) -> bool:
        """Whether its own push is left out that is neither in flight nor about to be made again."""
        left_out = {share.round for share in answer.shares if share.parts is None}
        again = range(self._pushed + 1, self._again_until + 1)
        return not left_out <= {f.push.round for f in self._flights}.union(again)

    def _with_own(self, answer: Answer) -> Answer:
        """The answer with its own pushes in their places, where they were left out."""
        own = {flight.push.round: flight.push.parts for flight in self._flights}
        shares = [
            replace(share, parts=own.get(share.round)) if share.parts is None and share.site == self.name else share
            for share in answer.shares
        ]
        return replace(answer, shares=tuple(shares))

    def _welcomed(self, welcome: Welcome, now: float) -> list[Message]:
        been_in, self._joined = self._joined, True
        beside = been_in and not self.exact and welcome.snapshot is not None  # it trains, and asked for the exact base
        left_out = welcome.round - 1 > welcome.pushed  # rounds have closed without it
        if welcome.snapshot is not None:
            self._rebase(welcome)
        for answer in welcome.answers:
            if answer.version > self.base.version:
                self._inbox[answer.version] = answer
        present = (welcome.step, welcome.round - 1)
        if welcome.snapshot is None and welcome.pushed > self._pushed:
            # Its state is older than what it has pushed. It does again what it has forgotten: the server drops
            # the pushes it has, and the answers come when they came before. Then it goes where the others are.
            self._again_until = welcome.pushed
            self._present = present if left_out else None
        elif left_out or (welcome.snapshot is not None and not beside):
            self._go_to(present)
        if beside:
            return []  # nothing was lost: what the server lacks is behind the request, on its way
        again = [f for f in self._flights if f.push.round > welcome.taken]
        for flight in again:
            flight.sent_at = now
        pushes: list[Message] = [f.push for f in again]
        return pushes if been_in or self.exact else [*pushes, Join(self.name, -1)]

    def _go_to(self, present: tuple[int, int]) -> None:
        """On to the step and the round where the others are."""
        step, number = present
        self.step = max(self.step, step) if not self._finishing else self.step
        self._round_step = max(self._round_step, step)
        self._round = max(self._round, number)

    def _rebase(self, welcome: Welcome) -> None:
        """The whole base at once: everything of one's own that it lacks stays pending.

        But what a state older than the last push calls pending may have left since: better lost than sent twice.
        """
        if welcome.version < self.base.version:
            raise ProtocolError(
                f"{self.name!r} has base version {self.base.version}, the server only {welcome.version}: "
                "the server was restored from an older checkpoint; restore the sites from the same one"
            )
        assert welcome.snapshot is not None
        snapshot = encoded_snapshot.whole(welcome.snapshot, welcome.encoded, self.base.layout.numel)
        if welcome.pushed > max(self._pushed, self._dropped):
            self.pending.clear()
            self._flights = []
            self._dropped = welcome.pushed
            if not self.plan.shares_gradients:
                self._mark.copy_(self.model)
        fresh = None if self.plan.shares_gradients else self._since_mark()
        self._inbox = {v: a for v, a in self._inbox.items() if v > welcome.version}
        self._flights = [f for f in self._flights if f.push.round > welcome.taken]
        self.base.restore(snapshot, welcome.version, welcome.step)
        self.exact = not welcome.encoded
        self.rebases += 1
        if welcome.pace is not None and self.pace is not None:
            self.pace = welcome.pace
        if fresh is not None:
            self._place(fresh, None)

    # -- durability -------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Copies of everything a site needs to go on from here; answers not yet applied are asked for again."""
        found = {f"base.{name}": tensor for name, tensor in self.base.snapshot().items()}
        found |= {f"pending.{name}": tensor for name, tensor in self.pending.state().items()}
        numbers = [self.base.version, self.base.step, self.step, self._round, self._pushed, self._sent_step]
        found["clock"] = torch.tensor([*numbers, self._called, int(self._finishing), self._round_step])
        if self.pace is not None:
            found["pace"] = pace_tensor(self.pace)
        if not self.plan.shares_gradients:
            found |= {"model": self.model.clone(), "mark": self._mark.clone()}
        for name, tensor in (("previous", self._previous), ("step_update", self._step_update), ("done", self._done)):
            if tensor is not None:
                found[name] = tensor.clone()
        if self.threshold is not None:
            found["threshold"] = self.threshold.state()
        if self.rate is not None:
            found["rate"] = torch.tensor(self.rate, dtype=torch.float64)
        if not self.exact:
            found["approximate"] = torch.tensor(1)  # to come back with it is to come back without a base
        for flight in self._flights:
            found[f"flight.{flight.push.round}"] = torch.frombuffer(bytearray(pack(flight.push)), dtype=torch.uint8)
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Become what `state()` was of; then `join`."""
        version, base_step, self.step, self._round, self._pushed, self._sent_step, self._called, over, begun = (
            int(number) for number in state["clock"]
        )
        self._round_step = begun
        if self.pace is not None:
            self.pace = tensor_pace(state["pace"])
        self._finishing = bool(over)
        self.base.restore(_under("base.", state), version, base_step)
        self.pending.load(_under("pending.", state))
        if not self.plan.shares_gradients:
            self.model.copy_(state["model"])
            self._mark.copy_(state["mark"])
        if self._previous is not None:
            self._previous.copy_(state["previous"])
        self._step_update = state["step_update"].clone() if "step_update" in state else None
        self._done = state["done"].clone() if "done" in state else None
        if self.threshold is not None:
            self.threshold.load(state["threshold"])
        self.rate = float(state["rate"]) if "rate" in state else None
        flights = _under("flight.", state)
        pushes = [unpack(bytes(flights[number].numpy())) for number in sorted(flights, key=int)]
        self._flights = [_Flight(push, 0.0) for push in pushes if isinstance(push, Push)]
        self._inbox, self._joined, self.exact = {}, False, "approximate" not in state


def _under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


class _Nothing(Selector):
    def choose(self, view: object) -> list[object]:  # type: ignore[override]
        del view
        return []


_NOTHING = _Nothing()

"""The global server as a state machine: messages and the time in, messages and the next wake-up out.

A round opens with its first push. It closes when every awaited site has pushed, or, with `backup(b)`, all but b of
them for this very round, in order. Closing aggregates, encodes the result with the server's own error feedback, moves
the server's base by what it decoded itself, and answers every site. Deadlines: a site missing `t_local`
seconds after a round opened holds the others back; after `t_global` it is lost and the round closes
without it. A push is taken once, by (site, round); one that comes after its round has closed goes into
the round that is open. Durable state is what `checkpoint` gives after each close: pushes of rounds still
open are sent again by their sites.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from weightgrad import codecs
from weightgrad.codecs import Codec, Fp32
from weightgrad.errors import ProtocolError
from weightgrad.kernels import fixed
from weightgrad.kernels.noise import derive
from weightgrad.wan import encoded_snapshot
from weightgrad.wan.aggregators import Accumulator, Aggregator
from weightgrad.wan.agreement import Agreement, Signs
from weightgrad.wan.answer_log import AnswerLog, MemoryLog
from weightgrad.wan.base import Base
from weightgrad.wan.consistency import Consistency
from weightgrad.wan.guard import Guard
from weightgrad.wan.membership import Member, Members
from weightgrad.wan.messages import (
    Answer,
    Call,
    Join,
    Leave,
    Message,
    Part,
    Push,
    Restarted,
    Share,
    Welcome,
    nbytes,
)
from weightgrad.wan.outbound import Outbound
from weightgrad.wan.planner import Auto, Decision, Planner
from weightgrad.wan.selectors import All, Selector, Stretch, View

_ROUNDS_OF_PATIENCE = 10
_SECONDS_TO_GRUMBLE = 5.0
_FIRST_BASES = 1 << 32  # in keys: beyond any round


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """The server's parts of a strategy."""

    aggregator: Aggregator
    consistency: Consistency
    down: Codec
    down_selector: Selector
    per_tensor: bool
    keep_loss: bool
    flush: Codec | None
    calls: bool
    t_local: float | None = None
    t_global: float | None = None
    adapts: bool = False  # t_global is the least, and grows with the rounds
    auto: Auto | None = None  # the server sets the pace
    relay: int = 0  # with so many sites or fewer, pushes are handed on as they came


@dataclass
class Closed:
    """What the driver may write down about a round."""

    answer: Answer
    senders: list[str]
    pushes: list[tuple[str, int]]  # (site, round) of each; a site that was late may have two
    up_bytes: int
    down_bytes: int  # of the answer, as the site that is sent most of it gets it
    base: str  # digest of the base that the answer made
    decision: Decision | None = None  # a new pace, and why
    signs: Signs | None = None  # how alike the pushes were, where a planner asks

    def words(self) -> dict[str, Any]:
        """For a ledger."""
        told: dict[str, Any] = {
            "version": self.answer.version,
            "step": self.answer.step,
            "senders": self.senders,
            "pushes": [list(push) for push in self.pushes],
            "up_bytes": self.up_bytes,
            "down_bytes": self.down_bytes,
            "base": self.base,
        }
        return told if self.signs is None else {**told, "common": self.signs.common, "same": self.signs.same}


@dataclass
class Outbox:
    """Messages to send, and what happened."""

    messages: list[tuple[str, Message]] = field(default_factory=list)
    closed: list[Closed] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    held_back: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)  # (site, why) of pushes taken as empty ones


@dataclass
class _Round:
    opened: float
    pushes: Accumulator
    step: int = 0
    rate: float | None = None
    up_bytes: int = 0
    senders: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)  # senders of nothing but what an earlier round closed without
    taken: dict[str, int] = field(default_factory=dict)
    all: list[tuple[str, int]] = field(default_factory=list)
    reported: bool = False
    came: dict[str, tuple[float, int]] = field(default_factory=dict)  # when a site's push came, and its bytes
    waiting: list[Push] = field(default_factory=list)  # encoded, until those before them in the order have come
    shares: list[Share] = field(default_factory=list)  # what has been added, to be handed on
    joined: set[str] = field(default_factory=set)  # since it opened: they may have forgotten what they pushed
    agreement: Agreement | None = None  # where a planner asks


class _Asked(Selector):
    """The stretches that the sites sent."""

    def __init__(self, found: list[Stretch]) -> None:
        self._found = found

    def choose(self, view: View) -> list[Stretch]:
        """Those."""
        del view
        return self._found


class GlobalServer:
    """One for all sites. What the guard refuses moves nothing, and its round closes all the same."""

    def __init__(
        self, base: Base, plan: ServerPlan, key: int, guard: Guard | None = None, log: AnswerLog | None = None
    ) -> None:
        self.base = base
        self.members = Members()
        self._plan = plan
        self._key = derive(key, _FIRST_BASES)
        self._guard = guard
        self._out = Outbound(base.layout, plan.down, key, per_tensor=plan.per_tensor, keep_loss=plan.keep_loss)
        self._memory: dict[str, Tensor] = {}
        self._rounds: dict[int, _Round] = {}
        self._room: Tensor | None = None  # where the next round may add up
        self._owes = False  # whether answers have held something back
        self._round = 0  # the last closed one
        self._log: AnswerLog = MemoryLog(4 * base.layout.numel) if log is None else log
        self._samples: int | None = None
        self._bases: dict[int, Tensor] = {}  # the last few by version, for delay compensation
        self._lasted: deque[float] = deque(maxlen=20)  # seconds from a round's first push to its end
        self.planner = Planner(plan.auto, base.layout.numel) if plan.auto is not None else None
        self._held: dict[tuple[str, int], tuple[float, int]] = {}  # by push: seconds until its answer, bytes of both
        self._keep_base()

    # -- messages in ------------------------------------------------------------------------

    def receive(self, message: Message, now: float) -> Outbox:
        """A message has come."""
        out = Outbox()
        if isinstance(message, Push):
            self._push(message, now, out)
        elif isinstance(message, Join):
            self._join(message, out)
        elif isinstance(message, Leave):
            if message.site in self.members.by_name:
                self.members.leave(message.site)
        else:
            raise ProtocolError(f"the global server was sent {type(message).__name__}, which only sites receive")
        self._close_ready(now, out)
        return out

    def wake(self, now: float) -> Outbox:
        """The time that `next_wake` named has come."""
        out = Outbox()
        if self._rounds:
            first = self._rounds[min(self._rounds)]
            late = [m.name for m in self.members.awaited if m.name not in first.senders]
            if self._plan.t_local is not None and now >= first.opened + self._plan.t_local and not first.reported:
                first.reported = True
                out.held_back = late
            if (patience := self.patience()) is not None and now >= first.opened + patience:
                for name in late:
                    self.members.lose(name)
                out.lost = late
        self._close_ready(now, out)
        return out

    def next_wake(self) -> float | None:
        """When a deadline runs out, if nothing comes before."""
        if not self._rounds:
            return None
        first = self._rounds[min(self._rounds)]
        due = []
        if self._plan.t_local is not None and not first.reported:
            due.append(first.opened + self._plan.t_local)
        if (patience := self.patience()) is not None:
            due.append(first.opened + patience)
        return min(due, default=None)

    def patience(self) -> float | None:
        """Seconds after which a missing site is lost: fixed, or grown to ten times what rounds take."""
        if self._plan.t_global is None or not self._plan.adapts or not self._lasted:
            return self._plan.t_global
        return max(self._plan.t_global, _ROUNDS_OF_PATIENCE * statistics.median(self._lasted))

    def overdue(self, now: float) -> tuple[int, list[str]] | None:
        """The oldest open round and whom it waits for, if it has been open five times as long as rounds are."""
        if not self._rounds:
            return None
        number = min(self._rounds)
        usual = statistics.median(self._lasted) if self._lasted else 0.0
        if now - self._rounds[number].opened < max(_SECONDS_TO_GRUMBLE, 5 * usual):
            return None
        return number, self.waits_for()

    def waits_for(self) -> list[str]:
        """The sites that the oldest open round lacks."""
        if not self._rounds:
            return []
        senders = self._rounds[min(self._rounds)].senders
        return sorted(m.name for m in self.members.awaited if m.name not in senders)

    # -- rounds -----------------------------------------------------------------------------

    def _push(self, push: Push, now: float, out: Outbox) -> None:
        if push.site not in self.members.by_name:
            out.messages.append((push.site, Restarted()))  # it joined after the checkpoint this server came back with
            return
        member = self.members.by_name[push.site]
        if not member.live and not member.done:
            self._welcome(self.members.join(push.site), push.seen, out)
        if push.round <= member.round:
            return  # sent again, and taken already
        if push.after > member.round:
            self._welcome(member, push.seen, out)  # one before it was lost: both must come again, in order
            return
        number = self._round + 1 if self._plan.consistency.alone else max(push.round, self._round + 1)
        if number not in self._rounds:
            self._open(number, push.site, now, out)
        current, size = self._rounds[number], nbytes(push)
        current.waiting.append(self._guarded(push, out))
        current.came[push.site] = (now, size)
        self._hear(push)
        current.step = max(current.step, push.step)
        current.up_bytes += size
        current.senders.add(push.site)
        if push.round < number and push.seen < self.base.version:
            current.late.add(push.site)
        current.taken[push.site] = push.round
        current.all.append((push.site, push.round))
        member.round = push.round
        member.done = member.done or push.final
        self._add(current, [m.name for m in self.members.awaited if m.name not in current.senders])

    def _hear(self, push: Push) -> None:
        """What the site has measured; the server takes off what it held the round for the others."""
        if self.planner is not None and push.report is not None:
            held, size = self._held.pop((push.site, push.report.round), (0.0, 0))
            network = push.report.round_seconds - held if size else None
            self.planner.observe(push.site, push.report, network, size)

    def _guarded(self, push: Push, out: Outbox) -> Push:
        why = None if self._guard is None else self._guard.judge(push, self.base.layout.numel)
        if why is None:
            return push
        out.refused.append((push.site, why))
        return replace(push, parts=())

    def _add(self, current: _Round, missing: list[str]) -> None:
        """Add up, in the order of the sites' names, the pushes that no missing one comes before.

        So the sum has the same bits whatever the order of arrival, and only what came out of turn waits.
        """
        current.waiting.sort(key=lambda push: push.site)
        while current.waiting and all(current.waiting[0].site < name for name in missing):
            push = current.waiting.pop(0)
            weight, parts = self._weight(push), self._compensated(push)
            current.pushes.add(push.site, parts, weight)
            if current.agreement is not None:
                current.agreement.add(parts)
            if self._relays:
                current.shares.append(Share(push.site, push.round, weight, parts))
            current.rate = push.rate if push.rate is not None else current.rate

    def _open(self, number: int, sender: str, now: float, out: Outbox) -> None:
        numel = self.base.layout.numel
        self._rounds[number] = _Round(
            now,
            self._plan.aggregator.open(numel, self._room),
            agreement=Agreement(numel) if self.planner is not None and self.planner.compares(number) else None,
        )
        self._room = None
        if self._plan.calls and not self._plan.consistency.alone:
            called = [m for m in self.members.awaited if m.name != sender and m.round < number]
            out.messages += [(m.name, Call(number)) for m in called]

    def _weight(self, push: Push) -> float:
        if self._samples is None:
            self._samples = max(push.samples, 1)
        return push.samples / self._samples * self._plan.consistency.weight(self.base.version - push.seen)

    def _compensated(self, push: Push) -> tuple[Part, ...]:
        """The push, with DC-ASGD's correction for what the base did since the site saw it.

        For a gradient g + lambda g g (w - w_seen); an update is a negative gradient, so it loses that.
        """
        strength = self._plan.consistency.compensation
        if strength == 0 or not push.parts:
            return push.parts
        if not self.base.takes_gradients:
            strength = -strength
        then = self._bases[max(push.seen, min(self._bases))]  # the oldest there is for one staler than that
        update = torch.zeros_like(self.base.vector)
        for one in push.parts:
            one.into(update, fixed.STORE)
        update += strength * update * update * (self.base.vector - then)
        return (Part(0, Fp32().encode(update, {}, 0)[0]),)

    def _keep_base(self) -> None:
        if self._plan.consistency.compensation:
            self._bases[self.base.version] = self.base.vector.clone()
            while len(self._bases) > 2 * len(self.members.by_name) + 1:
                del self._bases[min(self._bases)]

    def _close_ready(self, now: float, out: Outbox) -> None:
        while self._rounds and self._complete(self._rounds[min(self._rounds)]):
            self._close(min(self._rounds), now, out)

    def _complete(self, current: _Round) -> bool:
        if self._plan.consistency.alone:
            return True
        awaited = [m.name for m in self.members.awaited]
        missing = [name for name in awaited if name not in current.senders]
        if not missing:
            return True
        # What is late comes along, but the round waits for as many of its own: else it would close with less of
        # them, leave more of them late, and so on. Those that have finished wait for nobody either.
        allowed = min(self._plan.consistency.missing, len(self.members.listening) - 1)
        return len(missing) + sum(name in current.late for name in awaited) <= allowed

    def _close(self, number: int, now: float, out: Outbox) -> None:
        current = self._rounds.pop(number)
        self._add(current, [])
        if self._plan.consistency.alone:
            awaited = max(1, len(self.members.listening))
            current.pushes.weight = float(awaited)  # one of so many: a push moves the base by its share
        elif self._plan.consistency.missing and current.late == current.senders:
            # Nothing of its own: the others have finished, and what came after them has no more than its share.
            current.pushes.weight = max(current.pushes.weight, float(len(self.members.by_name)))
        touched = current.pushes.stretches()
        moved = self._plan.aggregator.close(current.pushes, self._memory)
        whole = self._relays and len(current.shares) == len(current.all)  # else some came when there were others
        shares = tuple(current.shares) if whole and touched else ()
        parts = () if shares else self._encode(moved, touched, number)
        self._room = current.pushes.total
        decision, signs = None, None
        if self.planner is not None:
            if current.agreement is not None:
                signs = current.agreement.signs()
                self.planner.compare(signs)
            decision = self.planner.decide([m.name for m in self.members.awaited], relayed=whole)
        answer = Answer(
            self.base.version + 1,
            number,
            max(current.step, self.base.step),
            parts,
            dict(current.taken),
            current.rate,
            decision.pace if decision is not None else None,
            shares,
        )
        listening = [m.name for m in self.members.listening]
        told = {n: answer.without(n) if shares and n not in current.joined else answer for n in listening}
        if self.planner is not None:
            self._held |= {
                (site, current.taken[site]): (now - came, size + nbytes(told.get(site, answer)))
                for site, (came, size) in current.came.items()
            }
            while len(self._held) > 4 * len(self.members.by_name):
                del self._held[next(iter(self._held))]
        self.base.apply(answer, moved)
        self._keep_base()
        self._round = number
        self._lasted.append(now - current.opened)
        for name, taken in current.taken.items():
            self.members.by_name[name].taken = taken
        self._log.append(answer)
        out.messages += told.items()
        down = max((nbytes(one) for one in told.values()), default=0)
        digest = self.base.digest()
        out.closed.append(
            Closed(answer, sorted(current.senders), current.all, current.up_bytes, down, digest, decision, signs)
        )

    def _encode(self, moved: Tensor, touched: list[Stretch], count: int) -> tuple[Part, ...]:
        last = not self.members.awaited and self._plan.keep_loss and not isinstance(self._plan.down, Fp32)
        if last and self._plan.flush is not None and (touched or bool(self._out.held.any())):
            # All have finished: what the down codec would keep back, or has, goes out too.
            return self._out.take(
                moved, All(), self.base.vector, step=self.base.step, count=count, codec=self._plan.flush
            )
        if not touched:
            return ()
        self._owes = self._owes or not isinstance(self.down, Fp32)
        selector = self._plan.down_selector
        if not selector.needs_pending:
            selector = _Asked(touched if self._plan.per_tensor else _flat(touched))
        return self._out.take(
            moved, selector, self.base.vector, step=self.base.step, count=count,
            codec=self.down if self.planner is not None else None,
        )  # fmt: skip

    @property
    def _relays(self) -> bool:
        """Whether pushes are handed on: few sites, something to lose by encoding again, nothing held back before."""
        few = len(self.members.by_name) <= self._plan.relay
        return few and not self._owes and not isinstance(self.down, Fp32)

    @property
    def down(self) -> Codec:
        """The codec of its answers now."""
        return self._plan.down if self.planner is None else codecs.parse(self.planner.now.down)

    # -- membership -------------------------------------------------------------------------

    def _join(self, join: Join, out: Outbox) -> None:
        if join.version > self.base.version:
            raise ProtocolError(
                f"{join.site!r} has base version {join.version}, the server only {self.base.version}: "
                "the server was restored from an older checkpoint; restore the sites from the same one"
            )
        for opened in self._rounds.values():
            opened.joined.add(join.site)
        self._welcome(self.members.join(join.site), join.version, out, join.first_base)

    def _welcome(self, member: Member, version: int, out: Outbox, first_base: str | None = None) -> None:
        missed = self._log.since(version, self.base.version) if version >= 0 else None
        snapshot = self.base.snapshot() if missed is None else None
        encoded: encoded_snapshot.Encoded = {}
        if snapshot is not None and first_base is not None:
            codec, key = encoded_snapshot.codec_of(first_base), derive(self._key, self.base.version)
            snapshot, encoded = encoded_snapshot.encode(snapshot, codec, key)
        out.messages.append(
            (
                member.name,
                Welcome(
                    self.base.version,
                    self._round + 1,
                    self.base.step,
                    member.taken,
                    missed or (),
                    snapshot,
                    member.round,
                    self.planner.now.pace if self.planner is not None and snapshot is not None else None,
                    encoded,
                ),
            )
        )

    # -- durability -------------------------------------------------------------------------

    def checkpoint(self) -> dict[str, Tensor]:
        """Named tensors: base, error feedback, outer memory, the guard's, and who has been taken how far."""
        found = {f"base.{k}": v for k, v in self.base.snapshot().items()}
        found |= {f"out.{k}": v for k, v in self._out.state().items()}
        found |= {f"outer.{k}": v.clone() for k, v in self._memory.items()}
        found["clock"] = torch.tensor([self.base.version, self.base.step, self._round, self._samples or 0])
        for name, m in self.members.by_name.items():
            over = (
                m.done and m.taken >= m.round
            )  # its last push is not in here yet: it will come again, and is waited for
            found[f"member.{name}"] = torch.tensor([int(m.live), int(over), m.taken])
        if self._guard is not None:
            found |= {f"guard.{k}": v for k, v in self._guard.state().items()}
        if self.planner is not None:
            found |= {f"planner.{k}": v for k, v in self.planner.state().items()}
        return found

    def restore(self, state: dict[str, Tensor]) -> Outbox:
        """Become the server of that checkpoint; tells its sites, the lost ones too, to say where they are."""
        version, step, self._round, samples = (int(x) for x in state["clock"])
        self._samples = samples or None
        own = {k.removeprefix("base."): v for k, v in state.items() if k.startswith("base.")}
        self.base.restore(own, version, step)
        self._out.load({k.removeprefix("out."): v for k, v in state.items() if k.startswith("out.")})
        self._owes = bool(self._out.held.any())
        self._memory = {k.removeprefix("outer."): v.clone() for k, v in state.items() if k.startswith("outer.")}
        if self._guard is not None:
            self._guard.load({k.removeprefix("guard."): v for k, v in state.items() if k.startswith("guard.")})
        if self.planner is not None:
            self.planner.load({k.removeprefix("planner."): v for k, v in state.items() if k.startswith("planner.")})
        self._rounds, self._bases, self._held = {}, {}, {}
        self._log.restart(version)
        self._keep_base()
        self.members = Members()
        for key, tensor in state.items():
            if key.startswith("member."):
                live, done, taken = (int(x) for x in tensor)
                name = key.removeprefix("member.")
                self.members.by_name[name] = Member(name, bool(live), bool(done), taken, taken)
        return Outbox([(m.name, Restarted()) for m in self.members.by_name.values() if m.live or not m.done])


def _flat(found: list[Stretch]) -> list[Stretch]:
    return [Stretch(s.start, (s.stop - s.start,)) for s in found]

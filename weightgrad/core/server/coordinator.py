"""The decisions of the global server: who is in, when a round closes and with which pushes, what a joining site gets.

The coordinator is a state machine without vectors: messages and the time go in, messages, orders and the next deadline
come out. The orders are for the `ServerShard` of each server process, which does the work on what the process serves,
so that all elements close with the same pushes.

The coordinator has the entry points. Its parts decide:

    OpenRounds (`core/server/open_rounds.py`)            when a round opens, for whom it waits, when it is complete
    PushChecks (`core/server/push_checks.py`)            which pushes are refused
    RoundClosing (`core/server/round_closing.py`)        with which pushes and weights a round closes
    RoundOutcome (`core/server/round_outcome.py`)        what follows from a round that has closed
    JoinReplies (`core/server/join_replies.py`)          which results, or which download, a joining site gets
    OperatorActions (`core/server/operator_actions.py`)  what the operator of the run asks for

A round opens with its first push (`receive_push`) and closes when it is complete (`next_order`). The shards aggregate,
encode and move; then `round_closed` makes the result and its messages. A push is included once, by (site, round); one
that comes after its round has closed goes into the round that is open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from weightgrad.codecs import Codec
from weightgrad.core.agreed_numbers import MOST_RATE
from weightgrad.core.server.close_order import ClosedPart, CloseOrder
from weightgrad.core.server.guard import Guard
from weightgrad.core.server.join_replies import JoinReplies
from weightgrad.core.server.membership import Member, Members
from weightgrad.core.server.open_round import OpenRound
from weightgrad.core.server.open_rounds import OpenRounds
from weightgrad.core.server.operation import Operation, Pause
from weightgrad.core.server.operator_actions import OperatorActions
from weightgrad.core.server.outbox import Decisions
from weightgrad.core.server.progress import ServerProgress
from weightgrad.core.server.push_checks import PushChecks
from weightgrad.core.server.push_facts import PushFacts
from weightgrad.core.server.result_headers import ResultHeaders
from weightgrad.core.server.round_closing import RoundClosing
from weightgrad.core.server.round_outcome import RoundOutcome
from weightgrad.core.server.round_timing import LinkObserver
from weightgrad.core.server.strategy import ServerStrategy
from weightgrad.core.shared_buffers import SharedBuffers
from weightgrad.core.vector_checks import with_prefix, without_prefix
from weightgrad.errors import ProtocolError
from weightgrad.wire import messages
from weightgrad.wire.messages import Join, Leave, Push, ServerRestarted, Waiting


class ServerCoordinator:
    """The coordinator of the global server. Memory: no vector of the model's size.

    Args:
        plan: the server's parts of the strategy.
        numel: the elements of the model.
        guard: checks every push; a push that it refuses counts as empty, and its round closes all the same.

    Attributes:
        members: the sites.
        rounds: the open rounds.
        checks: which pushes are refused.
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
        self.members = Members()
        self.controller = plan.auto.controller(numel) if plan.auto is not None else None
        self.first_digest: int | None = None
        self.buffers = SharedBuffers()
        self.first_norm = 0.0
        self.most_rate = MOST_RATE
        self.elsewhere = False
        self.aligned = True
        self.pause = Pause()
        self.rounds = OpenRounds(plan, self.members, self.pause)
        self.checks = PushChecks(plan, guard)
        self._operator = OperatorActions(self.members, self.pause, self.rounds)
        self._progress = ServerProgress()
        self._closing: tuple[int, OpenRound] | None = None  # the round that the shards are closing
        self._round_closing = RoundClosing(plan, self.members, self._progress, self.checks, self.controller)
        self._links = LinkObserver(self.controller)
        self._results = ResultHeaders()
        self._outcome = RoundOutcome(
            members=self.members,
            progress=self._progress,
            results=self._results,
            buffers=self.buffers,
            links=self._links,
            controller=self.controller,
        )
        self._join_replies = JoinReplies(self._progress, self._results, self.controller)

    @property
    def version(self) -> int:
        """The version of the global model."""
        return self._progress.version

    @property
    def step(self) -> int:
        """The step of the global model."""
        return self._progress.step

    @property
    def down(self) -> Codec:
        """The codec of the next result."""
        return self._round_closing.down

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
        self._operator.carry_out(operation, now, out)
        return out

    def wake(self, now: float) -> Decisions:
        """Handle the deadlines that have expired; to be called at the time that `next_wake` returned."""
        out = Decisions()
        self.rounds.wake(now, out)
        return out

    def next_wake(self) -> float | None:
        """When the next deadline expires if nothing comes before, or None if no round is open."""
        return self.rounds.next_wake()

    def timeout(self) -> float | None:
        """Seconds after which a missing site is lost, or None to wait forever."""
        return self.rounds.timeout()

    def overdue(self, now: float) -> bool:
        """Whether the oldest open round has been open five times as long as usual; never while the run is paused."""
        return self.rounds.overdue(now)

    def waiting(self, now: float) -> Waiting | None:
        """For whom the oldest open round waits, and how long it has; None if no round is open, or misses nobody."""
        return self.rounds.waiting(now)

    def stuck(self, now: float) -> bool:
        """Whether the oldest open round should have closed long ago, with or without the sites that it misses."""
        return self.rounds.stuck(now)

    def waits_for(self) -> list[str]:
        """The sites that the oldest open round misses, sorted."""
        return self.rounds.waits_for()

    def is_open(self, site: str, round_: int) -> bool:
        """Whether a push is in a round that has not closed."""
        return self.rounds.has(site, round_)

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
        member = self.members.by_name.get(push.site)
        pushed = 0 if member is None else member.pushed_round
        self.checks.check_numbers(push, pushed=pushed, closed=self._progress.round, most_rate=self.most_rate)

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
        following = self._progress.round + 1
        number = following if self.plan.consistency.alone else max(push.round, following)
        opened = self.rounds.of(number, push.site, now, out)
        self._links.receive(push)
        late = push.round < number and push.seen < self.version
        refusal = self.checks.problem(push, facts)
        if refusal is not None:
            opened.refused[push.site, push.round] = refusal
            out.refused.append((push.site, refusal))
            push = replace(push, buffers={})
        opened.receive(push, now, nbytes=size, late=late, facts=facts)
        member.pushed_round = push.round
        member.done = push.final  # a site that had left and pushes again is awaited again
        member.loading = False

    # -- rounds --------------------------------------------------------------------------------

    def next_order(self) -> CloseOrder | None:
        """The order to close the oldest open round, if it is complete. Until `round_closed`, there is no other."""
        if self._closing is not None or (complete := self.rounds.take_complete()) is None:
            return None
        self._closing = complete
        return self._round_closing.order(*complete, first_norm=self.first_norm, aligned=self.aligned)

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
        self._outcome.round_closed(order, parts, closing, now, out)
        self._progress.round = number
        self.rounds.closed(now - closing.opened_at)
        return out

    # -- membership ----------------------------------------------------------------------------

    def _receive_join(self, join: Join, out: Decisions) -> None:
        if join.version > self.version:
            raise ProtocolError(
                f"{join.site!r} has global model version {join.version}, the server only {self.version}: "
                "the server was restored from an older checkpoint; restore the sites from the same one"
            )
        self.rounds.rejoined(join.site)
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
        found = self._join_replies.reply(
            self.members.join(join.site),
            version,
            elsewhere=self.elsewhere,
            download_codec=join.download_codec,
            epoch=join.epoch,
            training=join.training,
        )
        out.downloads.append(found)

    def _reply_to(self, member: Member, version: int, out: Decisions) -> None:
        """Tell a site that has not asked the way to the present global model."""
        out.downloads.append(self._join_replies.reply(member, version, elsewhere=self.elsewhere))

    def read_log(self) -> None:
        """After `load`: the inputs that come are those of the log, until `forget_connections`."""
        self._results.read_log(begins=True)

    def forget_connections(self) -> None:
        """After a restart, and after the log has been read: nobody has been sent anything."""
        self._results.read_log(begins=False)
        for member in self.members.by_name.values():
            member.loads = None

    # -- checkpoint ----------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Everything that must survive the end of a round, as named tensors. Open rounds are not part of it."""
        found = {"clock": self._progress.to_tensor(), **with_prefix("member.", self.members.state())}
        found["durations"] = torch.tensor(self.rounds.deadlines.durations(), dtype=torch.float64)
        found |= with_prefix("agreed.", self._round_closing.agreed.state())
        found |= with_prefix("pause.", self.pause.state())
        found |= with_prefix("schedule.", self._results.state())
        found |= with_prefix("buffers.", self.buffers.state())
        if self.checks.guard is not None:
            found |= with_prefix("guard.", self.checks.guard.state())
        if self.controller is not None:
            found |= with_prefix("controller.", self.controller.state())
        return found

    def load(self, state: Mapping[str, Tensor], results: Sequence[messages.RoundResult] = ()) -> None:
        """Restore what `state` returned; open rounds are forgotten, their pushes come again.

        Args:
            state: the named tensors.
            results: the last results up to the version of the checkpoint, as far as all shards still have their values.
        """
        self._progress.load_tensor(state["clock"])
        self._round_closing.agreed.load(without_prefix("agreed.", state))
        self.pause.load(without_prefix("pause.", state))
        self.buffers.load(without_prefix("buffers.", state))
        if self.checks.guard is not None:
            self.checks.guard.load(without_prefix("guard.", state))
        if self.controller is not None:
            self.controller.load(without_prefix("controller.", state))
        self.rounds.clear()
        self.rounds.deadlines.load(state["durations"].tolist() if "durations" in state else ())
        self._closing = None
        self._links.clear()
        self.members.load(without_prefix("member.", state))
        self._results.load(without_prefix("schedule.", state), results)

    def lost_since_checkpoint(self) -> list[str]:
        """After `load`: the sites that are to join again, lost ones too."""
        return [member.name for member in self.members.by_name.values() if member.live or not member.done]

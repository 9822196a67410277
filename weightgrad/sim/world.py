"""The simulator: sites, links, server and faults on one virtual clock, written down in a ledger.

Everything is decided by the plan and its seed: the same plan gives the same bytes of ledger. Compute,
codecs, aggregation and the two state machines are the real ones; only seconds are modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from weightgrad.errors import NonFiniteError, RangeError
from weightgrad.kernels.noise import derive
from weightgrad.ledger import Ledger
from weightgrad.sim import codec_time, site
from weightgrad.sim.accounts import Accounts
from weightgrad.sim.clock import Clock
from weightgrad.sim.faults import schedule
from weightgrad.sim.judge import Evaluation, Judge
from weightgrad.sim.links import Links
from weightgrad.sim.plan import WorldPlan
from weightgrad.sim.site import SimSite
from weightgrad.sim.task import Task
from weightgrad.wan.answer_log import MemoryLog
from weightgrad.wan.base import Base
from weightgrad.wan.global_server import Closed, GlobalServer, Outbox
from weightgrad.wan.messages import Join, Leave, Message, Push, nbytes, numel

_LOG_BYTES = 2**26  # of answers, which the server keeps on its disk in the field


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    step: int
    steps: int
    loss: float
    accuracy: float | None
    virtual_seconds: float
    wan_bytes: int
    lan_bytes: int


class World:
    """One run."""

    def __init__(
        self,
        plan: WorldPlan,
        task: Task,
        ledger: Ledger,
        watch: Callable[[Progress], None] | None = None,
        accounts: Accounts | None = None,
    ) -> None:
        self.plan, self.task, self.ledger, self._accounts = plan, task, ledger, accounts
        self.clock = Clock()
        self.links = Links(plan.server, list(plan.links), plan.server_bit_s)
        self._watch = watch
        self._initial = task.initial()
        self._optimizer = (plan.optimizer[0], plan.strategy.optimizer_with(plan.optimizer[1]))
        log = MemoryLog(max(_LOG_BYTES, 4 * task.layout.numel), kept=True) if plan.faults else None
        self.server = GlobalServer(self._base(), plan.strategy.for_server(), derive(plan.seed, 20), log=log)
        if self.server.planner is not None:
            up = plan.strategy.wan_codec("up")
            self.server.planner.codec_bytes_s = codec_time.bytes_a_second(up, plan.codec_speed)
        self.server_alive = True
        self.sites = [site.make(n, place, plan, task, self._base) for n, place in enumerate(plan.sites)]
        self.by_name = {s.place.name: s for s in self.sites}
        for name, one in self.by_name.items():
            one.end.stopwatch.trip = 2 * self.links.delay(name)
        self.rounds = 0
        self.status = "finished"
        self.last: Evaluation | None = None
        self.judge = Judge(plan, task, self.server.base, self.sites[0].local)
        self._next_evaluation = plan.evaluate_every
        self._wake = math.inf
        self._decoded: dict[str, float] = {}  # when the server has decoded what a site sent
        self._link_event = math.inf
        self._loss = math.nan
        self._checkpoint: dict[str, Tensor] | None = None
        self._keeps_checkpoints = any(f.what == "kill" and plan.server in f.where for f in plan.faults)

    def _base(self) -> Base:
        shares = self.plan.strategy.shares == "gradients"
        return Base(self.task.layout, self._initial, optimizer=self._optimizer if shares else None, rate=self.plan.rate)

    # -- the run ----------------------------------------------------------------------------

    def run(self) -> None:
        """Until every site has finished. Ctrl-C leaves a ledger that can be read."""
        for one in self.sites:
            if one.place.name in self.plan.absent:
                one.alive = False
            else:
                self.server.members.join(one.place.name)
                self._send_all(one, one.end.join())
        if self._keeps_checkpoints:
            self._checkpoint = self.server.checkpoint()
        schedule(self)
        try:
            while not self._over():
                if not self.clock.step():
                    self.status = "interrupted"  # nothing will ever happen again: the server or a link is gone for good
                    break
        except (NonFiniteError, RangeError):
            self.status = "diverged"
        except BaseException as error:
            self.status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            raise
        finally:
            self._write_end()

    def _over(self) -> bool:
        """Every site has finished and has the last base, and no fault is still to bring one back."""
        there = (s for s in self.sites if s.alive and not s.left)
        last = self.server.base.version
        return all(s.end.finished and s.end.base.version == last for s in there) and not any(
            self.clock.now < fault.at + (fault.seconds or 0)
            for fault in self.plan.faults
            if fault.what in ("kill", "join", "leave")
        )

    # -- a site's time ----------------------------------------------------------------------

    def boundary(self, one: SimSite) -> None:
        """A site is between two steps, or something has come for one that waits."""
        if not one.alive or one.left or one.open_step is not None or not self.server_known(one):
            return
        one.applied += one.end.settle()
        now = self.clock.now
        if one.end.finished:
            one.applied.clear()
            self._stop_waiting(one)
            if one.leaving:
                one.left = True
                self._send_all(one, [Leave(one.place.name)])
            return
        if one.end.blocked(now) is not None:
            if one.waiting_since is None:
                one.waiting_since = now
            return
        self._stop_waiting(one)
        if one.end.step >= self.plan.steps or one.leaving:
            self._send_all(one, one.end.finish(now))
            one.waiting_since = now
            return
        one.open_step = one.compute() if self._accounts is None else self._accounts.compute(one)
        self._complete_later(one)

    def come_back(self, one: SimSite) -> None:
        """A site starts, or starts again with what it had written down after its last whole step."""
        if one.alive:
            return  # it was killed twice, and is back
        one.alive = True
        self._send_all(one, one.end.join())
        if one.open_step is not None:
            self._complete_later(one)  # the step it died in is done again

    def server_known(self, one: SimSite) -> bool:
        """Whether the site has ever been let in (a member of the roster, or joined later)."""
        return one.place.name in self.server.members.by_name

    def _stop_waiting(self, one: SimSite) -> None:
        if one.waiting_since is not None:
            one.times.waiting += self.clock.now - one.waiting_since
            one.waiting_since = None

    def _complete_later(self, one: SimSite) -> None:
        assert one.open_step is not None
        life = one.life
        self.clock.after(one.open_step.seconds, lambda: self._complete(one, life))

    def _complete(self, one: SimSite, life: int) -> None:
        if one.life != life or one.open_step is None:
            return
        done, one.open_step = one.open_step, None
        now = self.clock.now
        if done.gradient is not None:
            one.end.rate = self.plan.rate(one.end.step)  # goes with shared gradients, as in the field
        messages = one.end.stepped(now, done.gradient)
        if one.end.let_go:
            one.applied += [message for message in messages if isinstance(message, Push)]
        self._loss = done.loss
        self.ledger.write("step", now, site=one.place.name, step=one.end.step, loss=done.loss)
        if not math.isfinite(done.loss):
            raise NonFiniteError(f"the loss of site {one.place.name} is {done.loss} at step {one.end.step}")
        if one.end.step % self.task.epoch_steps == 0:
            one.end.new_epoch(self.plan.rate(one.end.step - 1))
        self._send_all(one, messages)
        if one.number == 0:
            self._report(None)
        self.boundary(one)

    # -- messages ---------------------------------------------------------------------------

    def _send_all(self, one: SimSite, messages: list[Message]) -> None:
        for message in messages:
            coding = self.plan.message_overhead
            if isinstance(message, Push) and self._accounts is not None:
                self._accounts.left(message)
            if isinstance(message, Push) and message.parts:
                coding += codec_time.encode_seconds(one.end.up, numel(message.parts), self.plan.codec_speed)
                one.times.codec += coding
            life = one.life

            def leave(message: Message = message, life: int = life) -> None:
                if one.life == life and one.alive:
                    self._put(one.place.name, self.plan.server, message, lambda: self._at_server(message))

            one.encoded = max(self.clock.now, one.encoded) + coding
            self.clock.at(one.encoded, leave) if one.encoded > self.clock.now else leave()

    def _put(self, sender: str, receiver: str, message: Message, arrive: Callable[[], None]) -> None:
        self.links.send(self.clock.now, sender, receiver, nbytes(message), arrive)
        self._plan_links()

    def _plan_links(self) -> None:
        due = self.links.next_event(self.clock.now)
        if due < self._link_event or self._link_event <= self.clock.now:
            self._link_event = due
            if due < math.inf:
                self.clock.at(due, lambda: self._run_links(due))

    def _run_links(self, due: float) -> None:
        if due != self._link_event:
            return  # something earlier was planned since
        for delay, arrive in self.links.run(self.clock.now):
            self.clock.after(delay, arrive)
        self._link_event = math.inf
        self._plan_links()

    def replan(self) -> None:
        """Links have changed under the flows."""
        self._link_event = math.inf
        self._plan_links()

    def _at_server(self, message: Message) -> None:
        if not self.server_alive:
            return
        decoding = self.plan.message_overhead
        if isinstance(message, Push) and message.parts:
            up = self.by_name[message.site].end.up
            decoding += codec_time.decode_seconds(up, numel(message.parts), self.plan.codec_speed)
        assert isinstance(message, Push | Join | Leave)
        # One after the other: an empty push must not overtake the one before it.
        free = max(self.clock.now, self._decoded.get(message.site, 0.0)) + decoding
        self._decoded[message.site] = free
        self.clock.at(free, lambda: self._server_takes(message))

    def _server_takes(self, message: Message) -> None:
        if self.server_alive:
            self.act(self.server.receive(message, self.clock.now))

    def act(self, out: Outbox) -> None:
        """Do what the server says."""
        for closed in out.closed:
            self._closed(closed)
        for name in out.lost:
            self.ledger.write("fault", self.clock.now, what="lost", where=[name])
        coding = self.plan.message_overhead
        if out.closed:
            down = self.server.down
            sent = sum(numel(closed.answer.parts) for closed in out.closed)
            coding += codec_time.encode_seconds(down, sent, self.plan.codec_speed)
        for name, message in out.messages:
            self.clock.after(coding, lambda name=name, message=message: self._from_server(name, message))  # type: ignore[misc]
        wake = self.server.next_wake()
        if wake is not None and wake != self._wake:
            self._wake = wake
            self.clock.at(wake, lambda: self._wake_server(wake))

    def _wake_server(self, wake: float) -> None:
        if self.server_alive and self._wake == wake:
            self._wake = math.inf
            self.act(self.server.wake(self.clock.now))

    def _from_server(self, name: str, message: Message) -> None:
        one = self.by_name[name]
        if self.server_alive and one.alive:
            self._put(self.plan.server, name, message, lambda: self._soon_at_site(one, message))

    def _soon_at_site(self, one: SimSite, message: Message) -> None:
        if self.plan.message_overhead:
            self.clock.after(self.plan.message_overhead, lambda: self._at_site(one, message))
        else:
            self._at_site(one, message)

    def _at_site(self, one: SimSite, message: Message) -> None:
        if one.alive and not one.left:
            self._send_all(one, one.end.receive(message, self.clock.now))
            self.boundary(one)

    # -- what is written down ---------------------------------------------------------------

    def _closed(self, closed: Closed) -> None:
        self.rounds += 1
        if self._accounts is not None:
            self._accounts.taken(closed)
        answer = closed.answer
        self.ledger.write("round", self.clock.now, **closed.words())
        if closed.decision is not None:
            self.ledger.write("pace", self.clock.now, version=answer.version, **closed.decision.words())
        if self._keeps_checkpoints:
            self._checkpoint = self.server.checkpoint()
        self.judge.moved()
        if answer.step >= self._next_evaluation:
            self._next_evaluation = (answer.step // self.plan.evaluate_every + 1) * self.plan.evaluate_every
            self.evaluate()

    def restore_server(self) -> None:
        """The server comes back with its last checkpoint."""
        assert self._checkpoint is not None
        self._wake = math.inf
        self.act(self.server.restore(self._checkpoint))
        for one in self.sites:
            if one.alive and not self.server_known(one):
                self._send_all(one, one.end.join())  # it came while nobody was there

    @property
    def wan_bytes(self) -> int:
        """Over all links, both ways."""
        return sum(sum(both) for both in self.links.bytes)

    @property
    def lan_bytes(self) -> int:
        """In all sites."""
        return sum(s.times.lan_bytes for s in self.sites)

    def evaluate(self) -> Evaluation:
        """The server's base now; costs no virtual time."""
        found = self.judge.evaluate()
        self.last = found
        self.ledger.write(
            "evaluate",
            self.clock.now,
            step=self.server.base.step,
            version=self.server.base.version,
            accuracy=found.accuracy,
            loss=found.loss,
            base_accuracy=found.base,
            quantized_accuracy=found.quantized,
            ema_accuracy=found.ema,
            wan_bytes=self.wan_bytes,
            lan_bytes=self.lan_bytes,
        )
        self._report(found.accuracy)
        return found

    def _report(self, accuracy: float | None) -> None:
        if self._watch is not None:
            step = min((s.end.step for s in self.sites if s.alive and not s.left), default=self.plan.steps)
            if accuracy is None and self.last is not None:
                accuracy = self.last.accuracy
            self._watch(
                Progress(step, self.plan.steps, self._loss, accuracy, self.clock.now, self.wan_bytes, self.lan_bytes)
            )

    def _write_end(self) -> None:
        if self.status == "finished":
            self.evaluate()
        now = self.clock.now
        for link, both in zip(self.links.links, self.links.bytes, strict=True):
            self.ledger.write("link", now, between=list(link.between), bytes=list(both))
        for one in self.sites:
            times = one.times
            self.ledger.write(
                "site",
                now,
                site=one.place.name,
                steps=one.end.step,
                compute_seconds=times.compute,
                codec_seconds=times.codec,
                lan_seconds=times.lan,
                waiting_seconds=times.waiting,
                lan_bytes=times.lan_bytes,
            )
        self.ledger.write("end", now, status=self.status)

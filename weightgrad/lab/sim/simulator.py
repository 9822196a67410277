"""The simulator: sites, links, server and faults on one virtual clock, recorded in an event log.

The plan and its seed decide everything: the same plan gives the same bytes of event log. Gradients, codecs,
aggregation and both state machines are the real ones; only durations are modelled.

Actions on the clock are partials of methods, not lambdas, so that a checkpoint can hold them (lab/run/checkpoint.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from weightgrad.codecs import cost as codec_cost
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.local_model import gather
from weightgrad.core.random_streams import RunStream
from weightgrad.core.server.result_log import MemoryResultLog
from weightgrad.core.server.state import ClosedRound, Outbox, ServerState
from weightgrad.errors import NonFiniteError, RangeError
from weightgrad.event_log import EventLog
from weightgrad.kernels.noise import derive
from weightgrad.lab.sim.conservation import ConservationAudit
from weightgrad.lab.sim.evaluation import Evaluation, Evaluator
from weightgrad.lab.sim.faults import schedule_faults
from weightgrad.lab.sim.links import Links
from weightgrad.lab.sim.network import Clock, SimulatedNetwork
from weightgrad.lab.sim.plan import SimulationPlan
from weightgrad.lab.sim.progress import Progress
from weightgrad.lab.sim.replica_memory import ReplicaMemory
from weightgrad.lab.sim.simulation_log import SimulationLog
from weightgrad.lab.sim.site import SimSite, holdings, make, served
from weightgrad.lab.sim.step_memory import StepMemory
from weightgrad.lab.sim.task import Task
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_sizes import nbytes
from weightgrad.wire.messages import Join, Leave, Message, Push, numel

_LOG_BYTES = 2**26  # of round results; in a deployment the server keeps them on disk


class Simulator:
    """One simulated run.

    Args:
        plan: Sites, links, faults, strategy and training.
        task: What is trained.
        events: The event log to write.
        watch: Called with the progress after steps of the first site and after evaluations.
        audit: Follows every update, if given.
        size_of: The bytes of a message on the WAN; a stand-in for a larger model counts those of that model.
        step_begins: Called with the site, the time and the length of each step, when it begins.
    """

    def __init__(
        self,
        plan: SimulationPlan,
        task: Task,
        events: EventLog,
        watch: Callable[[Progress], None] | None = None,
        audit: ConservationAudit | None = None,
        size_of: Callable[[Message], int] = nbytes,
        step_begins: Callable[[str, float, float], None] | None = None,
    ) -> None:
        self.plan, self.task, self.events, self._audit = plan, task, events, audit
        self._size_of, self._step_begins = size_of, step_begins
        self.clock = Clock()
        self._log = SimulationLog(events, self.clock)
        self.network = SimulatedNetwork(self.clock, Links(plan.server, list(plan.links), plan.server_bit_s))
        self.watch = watch
        self._initial: Tensor | None = task.initial()
        self._gradient: Tensor | None = None
        self._optimizer = (plan.optimizer[0], plan.strategy.optimizer_with(plan.optimizer[1]))
        key = derive(plan.seed, RunStream.GLOBAL_SERVER)
        parts = [self._global_model(own) for own in served(plan, task.layout)] if plan.server_processes > 1 else []
        self.server = ServerState(
            self._global_model(), plan.strategy.for_server(), key, make_log=self._make_log, parts=parts
        )
        if self.server.controller is not None:
            up = plan.strategy.wan_codec("up")
            self.server.controller.codec_bytes_s = codec_cost.round_trip_bytes_s(up, plan.codec_speed)
        self.server_alive = True
        self.sites = [make(n, spec, plan, task, self._global_model) for n, spec in enumerate(plan.sites)]
        self._initial = None  # every replica has its copy
        self._step_memory = StepMemory(self.sites)
        self._replica_memory = ReplicaMemory(self.server, self.sites)
        self.by_name = {s.place.name: s for s in self.sites}
        for spec in plan.sites:
            if (held := holdings(spec, plan, task.layout)) is not None:
                self.server.set_holdings(spec.name, held)
        for name, site in self.by_name.items():
            site.state.step_timer.trip = 2 * self.network.links.delay(name)
        self.rounds = 0
        self.status = "finished"
        self.last: Evaluation | None = None
        quantizing = (s.local for s in self.sites if s.local is not None and s.local.weight_encoder is not None)
        self.evaluator = Evaluator(plan, task, self.server.global_model, next(quantizing, None))
        self._next_evaluation = plan.evaluate_every
        self._wake = math.inf
        self._decoded: dict[str, float] = {}  # by site: when the server has decoded its last message
        self._loss = math.nan
        self._checkpoint: dict[str, Tensor] | None = None
        self._keeps_checkpoints = any(f.what == "kill" and plan.server in f.where for f in plan.faults)

    def _global_model(self, held: Intervals | None = None) -> GlobalModel:
        """A replica at the start of the run; replicas of the whole model share the memory of their gradient."""
        assert self._initial is not None
        layout, weights, gradient = self.task.layout, self._initial, None
        optimizer = self._optimizer if self.plan.strategy.shares == "gradients" else None
        if held is not None:
            weights = gather(weights, Intervals.whole(weights.numel()), held, torch.empty(held.numel))
        elif optimizer is not None:
            gradient = self._gradient = torch.zeros_like(weights) if self._gradient is None else self._gradient
        return GlobalModel(layout, weights, optimizer=optimizer, rate=self.plan.rate, held=held, gradient=gradient)

    def _make_log(self, numel: int) -> MemoryResultLog:
        return MemoryResultLog(
            max(_LOG_BYTES, 4 * numel) if self.plan.faults else 4 * numel, kept=bool(self.plan.faults)
        )

    # -- the run ----------------------------------------------------------------------------

    def run(self, between: Callable[[], None] | None = None) -> None:
        """Run until every site has finished. An interrupt (Ctrl-C) leaves a readable event log.

        Args:
            between: Called between two actions, when a checkpoint can be written.
        """
        for site in self.sites:
            if site.place.name in self.plan.absent:
                site.alive = False
            else:
                self.server.members.join(site.place.name)
                self._send_all(site, site.state.join())
            self._log.threshold(site)
        if self._keeps_checkpoints:
            self._checkpoint = self.server.checkpoint()
        schedule_faults(self)
        self.go_on(between)

    def go_on(self, between: Callable[[], None] | None = None) -> None:
        """Run from where the simulator is, which was perhaps read from a checkpoint; see `run`."""
        try:
            while not self._over():
                if not self.clock.step():
                    self.status = "interrupted"  # nothing is left to do: the server or a link is down for good
                    break
                if between is not None:
                    between()
        except (NonFiniteError, RangeError):
            self.status = "diverged"
        except BaseException as error:
            self.status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            raise
        finally:
            self._write_end()

    def _over(self) -> bool:
        """Every site has finished and has the last global model, and no fault that moves a site is still to come."""
        there = (s for s in self.sites if s.alive and not s.left)
        last = self.server.global_model.version
        return all(s.state.finished and s.state.version == last for s in there) and not any(
            self.clock.now < fault.at + (fault.seconds or 0)
            for fault in self.plan.faults
            if fault.what in ("kill", "join", "leave")
        )

    # -- the steps of a site ------------------------------------------------------------------

    def continue_site(self, site: SimSite) -> None:
        """Let a site go on that is between two steps, or that waits and has received a message."""
        if not site.alive or site.left or site.open_step is not None or not self.is_member(site):
            return
        site.applied += site.state.apply_results()
        self._replica_memory.borrow(site)
        now = self.clock.now
        if site.state.finished:
            site.end()
            self._stop_waiting(site)
            if site.leaving:
                site.left = True
                self._send_all(site, [Leave(site=site.place.name)])
            return
        if (why := site.state.blocked(now)) is not None:
            if site.waiting_since is None:
                site.waiting_since, site.waiting_for = now, why
            return
        self._stop_waiting(site)
        if site.state.step >= self.plan.steps or site.leaving:
            site.steps_done()
            self._send_all(site, site.state.finish(now))
            site.waiting_since, site.waiting_for = now, "flush"
            return
        with self._step_memory.during_step(site):
            site.open_step = site.compute() if self._audit is None else self._audit.compute(site)
        if self._step_begins is not None:
            self._step_begins(site.place.name, now, site.open_step.seconds)
        self._complete_later(site)

    def start_site(self, site: SimSite) -> None:
        """Start a site, or restart it with the state that it had after its last complete step."""
        if site.alive:
            return  # it was killed twice and is already back
        site.alive = True
        self._send_all(site, site.state.join())
        if site.open_step is not None:
            self._complete_later(site)  # it repeats the step in which it died

    def is_member(self, site: SimSite) -> bool:
        """Whether the server knows the site: it was there at the start, or has joined."""
        return site.place.name in self.server.members.by_name

    def _stop_waiting(self, site: SimSite) -> None:
        if site.waiting_since is not None:
            seconds = self.clock.now - site.waiting_since
            site.times.waiting += seconds
            if site.waiting_for == "stall":
                self._log.stall(site, seconds)
            site.waiting_since, site.waiting_for = None, ""

    def _complete_later(self, site: SimSite) -> None:
        assert site.open_step is not None
        life = site.life
        self.clock.after(site.open_step.seconds, partial(self._complete, site, life))

    def _complete(self, site: SimSite, life: int) -> None:
        if site.life != life or site.open_step is None:
            return
        done, site.open_step = site.open_step, None
        now = self.clock.now
        if done.gradient is not None:
            site.state.rate = self.plan.rate(site.state.step)  # sent along with shared gradients, as in a deployment
        messages = site.state.after_step(now, done.gradient)
        if site.state.moved_by_push:
            site.applied += [message for message in messages if isinstance(message, Push)]
        self._loss = done.loss
        self._log.step(site, done.loss)
        if not math.isfinite(done.loss):
            raise NonFiniteError(f"the loss of site {site.place.name} is {done.loss} at step {site.state.step}")
        if site.state.step % self.task.epoch_steps == 0:
            site.state.new_epoch()
            self._log.threshold(site)
        self._send_all(site, messages)
        if site.number == 0:
            self._report(None)
        self.continue_site(site)

    # -- messages ---------------------------------------------------------------------------

    def _send_all(self, site: SimSite, messages: list[Message]) -> None:
        for message in messages:
            coding = self.plan.message_overhead
            if isinstance(message, Push) and self._audit is not None:
                self._audit.record_push(message)
            if isinstance(message, Push) and message.segments:
                coding += codec_cost.encode_seconds(site.state.up, numel(message.segments), self.plan.codec_speed)
                site.times.codec += coding
            send = partial(self._send, site, site.life, message)
            site.encoded = max(self.clock.now, site.encoded) + coding
            self.clock.at(site.encoded, send) if site.encoded > self.clock.now else send()

    def _send(self, site: SimSite, life: int, message: Message) -> None:
        if site.life == life and site.alive:
            arrive = partial(self._at_server, message)
            self.network.send(site.place.name, self.plan.server, self._size_of(message), arrive)

    def _at_server(self, message: Message) -> None:
        if not self.server_alive:
            return
        decoding = self.plan.message_overhead
        if isinstance(message, Push) and message.segments:
            up = self.by_name[message.site].state.up
            decoding += codec_cost.decode_seconds(up, numel(message.segments), self.plan.codec_speed)
        assert isinstance(message, Push | Join | Leave)
        # In order: an empty push must not overtake the push before it.
        free = max(self.clock.now, self._decoded.get(message.site, 0.0)) + decoding
        self._decoded[message.site] = free
        self.clock.at(free, partial(self._server_receives, message))

    def _server_receives(self, message: Message) -> None:
        if self.server_alive:
            self._carry_out(self.server.receive(message, self.clock.now))

    def _carry_out(self, out: Outbox) -> None:
        """Record what happened at the server, and send its messages."""
        for closed in out.closed:
            self._closed(closed)
        for name in out.lost:
            self._log.lost(name)
        coding = self.plan.message_overhead
        if out.closed:
            down = self.server.down
            sent = sum(numel(closed.result.segments) for closed in out.closed)
            coding += codec_cost.encode_seconds(down, sent, self.plan.codec_speed)
        for name, message in out.messages:
            self.clock.after(coding, partial(self._from_server, name, message))
        wake = self.server.next_wake()
        if wake is not None and wake != self._wake:
            self._wake = wake
            self.clock.at(wake, partial(self._wake_server, wake))

    def _wake_server(self, wake: float) -> None:
        if self.server_alive and self._wake == wake:
            self._wake = math.inf
            self._carry_out(self.server.wake(self.clock.now))

    def _from_server(self, name: str, message: Message) -> None:
        site = self.by_name[name]
        if self.server_alive and site.alive:
            arrive = partial(self._arrived_at_site, site, message)
            self.network.send(self.plan.server, name, self._size_of(message), arrive)

    def _arrived_at_site(self, site: SimSite, message: Message) -> None:
        if self.plan.message_overhead:
            self.clock.after(self.plan.message_overhead, partial(self._at_site, site, message))
        else:
            self._at_site(site, message)

    def _at_site(self, site: SimSite, message: Message) -> None:
        if site.alive and not site.left:
            self._send_all(site, site.state.receive(message, self.clock.now))
            self.continue_site(site)

    # -- rounds and evaluations ---------------------------------------------------------------

    def _closed(self, closed: ClosedRound) -> None:
        self.rounds += 1
        if self._audit is not None:
            self._audit.record_round(closed)
        result = closed.result
        self._log.round(closed)
        if self._keeps_checkpoints:
            self._checkpoint = self.server.checkpoint()
        self.evaluator.update_average()
        if result.step >= self._next_evaluation:
            self._next_evaluation = (result.step // self.plan.evaluate_every + 1) * self.plan.evaluate_every
            self.evaluate()

    def restore_server(self) -> None:
        """Restart the server from its last checkpoint."""
        assert self._checkpoint is not None
        self._wake = math.inf
        self._carry_out(self.server.restore(self._checkpoint))
        for site in self.sites:
            if site.alive and not self.is_member(site):
                self._send_all(site, site.state.join())  # it asked to join while the server was down

    def forget_sites(self) -> None:
        """Give back the memory of the sites, after the run; the server and what `evaluator` needs stay."""
        self.sites.clear()
        self.by_name.clear()
        self._step_memory, self._replica_memory = StepMemory(()), ReplicaMemory(self.server, ())
        self.clock.clear()

    @property
    def wan_bytes(self) -> int:
        """Bytes over all WAN links, both directions."""
        return self.network.wan_bytes

    @property
    def lan_bytes(self) -> int:
        """Bytes inside all sites."""
        return sum(s.times.lan_bytes for s in self.sites)

    def evaluate(self) -> Evaluation:
        """Evaluate the server's global model; this takes no virtual time."""
        found = self.evaluator.evaluate()
        self.last = found
        model = self.server.global_model
        self._log.evaluation(found, model, wan_bytes=self.wan_bytes, lan_bytes=self.lan_bytes)
        self._report(found.accuracy)
        return found

    def _report(self, accuracy: float | None) -> None:
        if self.watch is not None:
            step = min((s.state.step for s in self.sites if s.alive and not s.left), default=self.plan.steps)
            if accuracy is None and self.last is not None:
                accuracy = self.last.accuracy
            self.watch(
                Progress(step, self.plan.steps, self._loss, accuracy, self.clock.now, self.wan_bytes, self.lan_bytes)
            )

    def _write_end(self) -> None:
        if self.status == "finished":
            self.evaluate()
        self._log.end(self.status, self.network.links, self.sites)

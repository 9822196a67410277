"""One rank's part in a run, from admission to leaving: what happens around the steps of the user's optimizer.

Rank 0 leads: it has the coordinator, decides, and tells the other ranks. Every rank does what was decided for the
elements that it holds. Between two decisions a step is the user's own: it is counted, and that is all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weightgrad.core import pieces
from weightgrad.core.global_model import digest_of, segments_of
from weightgrad.core.gradient_shard import GradientShard
from weightgrad.core.layout import Layout
from weightgrad.core.local_model import gather
from weightgrad.core.random_streams import RunStream
from weightgrad.core.site_coordinator import SiteCoordinator
from weightgrad.core.site_shard import PushOrder, SiteShard
from weightgrad.core.strategies import Strategy
from weightgrad.core.update_shard import UpdateShard
from weightgrad.errors import RefusedError, WeightGradError
from weightgrad.event_log import EventLog
from weightgrad.kernels.noise import derive
from weightgrad.local.weight_encoder import decode_flat
from weightgrad.runtime import sparse_gradients
from weightgrad.runtime.admission import AdmissionReply
from weightgrad.runtime.ahead_replica import AheadReplica
from weightgrad.runtime.announced_optimizer import AnnouncedOptimizer
from weightgrad.runtime.final_state import SiteFinalState, all_buffers
from weightgrad.runtime.join_options import JoinOptions
from weightgrad.runtime.module_weights import ModuleWeights
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.progress_log import ProgressLog
from weightgrad.runtime.rank_connection import RankConnection
from weightgrad.runtime.rank_step import RankStep
from weightgrad.runtime.replicas import ReplicaExchange, Sharding
from weightgrad.runtime.site_checkpoint import SiteCheckpoint
from weightgrad.runtime.site_orders import (
    Abandon,
    Apply,
    Continue,
    Keep,
    Load,
    Look,
    Measure,
    PushNothing,
    Release,
    SiteOrder,
    Wait,
    parse,
    to_bytes,
)
from weightgrad.runtime.user_replica import UserReplica
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_parts import model_parts
from weightgrad.wire.messages import JoinReply, Leave, Message, ModelPart, Push, RoundResult

log = logging.getLogger("weightgrad")

_POLL_S = 0.2  # between two looks at the connection during a wait
_WAIT_TOLD_S = 0.5  # between two words to ranks that wait: their connections may have to be made anew, too


@dataclass(frozen=True)
class TrainedModel:
    """What a rank trains: its parameters, its optimizer, and the buffers that are averaged over the ranks or kept."""

    module: nn.Module
    weights: ModuleWeights
    layout: Layout
    sharding: Sharding
    optimizer: Optimizer
    announced: AnnouncedOptimizer
    buffers: list[Tensor]
    averages_buffers: bool
    averages_gradients: bool


class SiteTraining:
    """Trains one rank's part of a site's model. Rank 0 also has the coordinator.

    Args:
        options: What `join` was given.
        group: The ranks of the site.
        connection: This rank's connections to the global server.
        events: The site's event log, if this rank has one.
        model: What is trained.
        reply: The server's reply to the admission request.
        samples: How much the site's updates weigh.
    """

    def __init__(
        self,
        options: JoinOptions,
        group: SiteGroup,
        connection: RankConnection,
        events: EventLog | None,
        model: TrainedModel,
        reply: AdmissionReply,
        samples: int,
    ) -> None:
        self._options, self._group, self._model, self._reply = options, group, model, reply
        self.name, self.strategy = options.site, Strategy(**reply.strategy)
        self.connection, self._events = connection, events
        self._progress: ProgressLog | None = None
        self.steps = 0
        self.waited = 0.0
        """Seconds that training has waited for the global server."""
        self.joined = False
        """Whether the server has been sent a Join, so that it must be sent a Leave."""
        self._next_decision = 0
        self._squares: list[float] = [0.0, 0.0]
        self._first_digest = 0
        self._exact_follows: JoinReply | None = None
        self._steps_before = 0
        self._moved = self._redistributed = False
        self._all_there = True  # whether all ranks had what rank 0 asked for
        self._plan = plan = self.strategy.for_site()
        self.coordinator: SiteCoordinator | None = None
        if group.first:
            self.coordinator = SiteCoordinator(self.name, plan, samples, download_codec=options.download_codec)
            self.coordinator.epoch = connection.epoch
            self.coordinator.replays = options.state is not None
        self.rank_step = RankStep(
            model.weights,
            model.optimizer,
            model.layout,
            self.strategy,
            group,
            derive(reply.seed, RunStream.LOCAL_STEP, reply.number),
            clip_norm=reply.clip_norm,
            averaged=model.averages_gradients,
        )
        self._share = ReplicaExchange(model.sharding, group, model.weights)
        self._replica: UserReplica | AheadReplica | None = None
        self.shard = self._make_shard()
        self.shard.served = reply.served
        self.checkpoint: SiteCheckpoint | None = None
        if options.state is not None:
            self.checkpoint = SiteCheckpoint(
                options.state, self.name, group, self.strategy, reply.seed, model, self.rank_step, self.shard
            )

    def _make_shard(self) -> SiteShard:
        model, key = self._model, derive(self._reply.seed, RunStream.SITE_STATE, self._reply.number)
        if not self._plan.shares_gradients:
            model.weights.begin()
            shard = UpdateShard(self.name, model.layout, model.weights, self._plan.for_shard, key)
            model.weights.end(changed=False)
            return shard
        replica = UserReplica(
            model.weights,
            self.rank_step.gradients,
            model.optimizer,
            model.layout,
            self._share,
            self._step_now,
        )
        self._replica = replica
        if self._plan.resume.ahead:
            self._replica = AheadReplica(replica, lambda: self.shard.in_flight, lambda: model.announced.rate)
        return GradientShard(self.name, model.layout, model.weights, self._plan.for_shard, key, self._replica)

    def _step_now(self) -> None:
        """Take an optimizer step that the user has not asked for."""
        self.rank_step.busy = True
        try:
            self._model.optimizer.step()
        finally:
            self.rank_step.busy = False

    # -- the beginning ----------------------------------------------------------------------

    def begin(self) -> None:
        """Go on from the checkpoint if there is one, join, and wait until the site may train.

        Raises:
            CheckpointError: The checkpoint is of another run.
            RefusedError: The server has lost the global model that this site has.
        """
        restored = self.checkpoint.restore(self.coordinator) if self.checkpoint is not None else None
        self.steps = 0 if restored is None else restored
        self.connection.begin(self.shard, self._first_parts)
        digest = self._first_digest = self._group.whole_sum(self._own_digest()) if restored is None else 0
        if self._plan.shares_gradients and restored is None:
            self._model.announced.begin_anew(say=self._group.first)
        if self._plan.shares_gradients:
            self._model.weights.begin()  # until the site has joined it may be asked for its first weights again
        if self._reply.init_model and restored is None:
            self.connection.send_model()
        if self.coordinator is not None:
            if self.rank_step.not_applied:
                what = ", ".join(self.rank_step.not_applied)
                log.warning(
                    "%s averages gradients by itself: of %s no %s inside it", self.name, self.strategy.name, what
                )
            self._lead(lambda: self._join(digest if restored is None else None))
        else:
            self._follow()
        self._model.weights.end(changed=False)
        if self._replica is not None:
            self._replica.resume_passes()
        if restored is None or self._moved:
            self.rank_step.for_passes()
        else:
            self.rank_step.resume_passes()

    def _own_digest(self) -> int:
        """The digest of the weights that this rank holds."""
        held, total = self._model.weights.held, 0
        self._model.weights.begin()
        for piece in pieces.cut(held, self._model.layout, per_tensor=False):
            values = self._model.weights.read(piece.intervals, torch.empty(piece.numel))
            total += digest_of(values.contiguous(), piece.intervals)
        self._model.weights.end(changed=False)
        return total % 2**64

    def _first_parts(self, served: Intervals) -> list[ModelPart]:
        """This rank's weights for one server process."""
        own = self._model.weights.held & served
        if isinstance(self.shard, UpdateShard):
            vector = gather(self.shard.global_model, self.shard.held, own, torch.empty(own.numel))
        else:
            vector = self._model.weights.read(own, torch.empty(own.numel))
        cut = pieces.cut(own, self._model.layout, per_tensor=False)
        return list(model_parts(0, [("weights", segments_of(vector, own, cut))]))

    def _join(self, digest: int | None) -> None:
        coordinator, version = self._lead_coordinator, self._lead_coordinator.version
        if self._events is not None:
            pushed = coordinator.progress.pushed_round
            self._events.write("start", self.connection.now, site=self.name, step=self.steps, pushed=pushed)
            self._write_threshold(coordinator)
        self.connection.send_control(coordinator.join(digest=digest if version == 0 else None))
        self.joined = True
        self._wait_until_unblocked()
        self.steps = coordinator.progress.step
        log.info("%s joins with global model version %d", self.name, coordinator.version)
        if digest is not None and coordinator.full_downloads:
            log.warning(
                "%s: the model has the weights of the global model, version %d, and not those that it had before "
                "prepare(). To begin from others, load them at the site that starts first: they become the global one",
                self.name,
                coordinator.version,
            )
        self._progress = ProgressLog(self.name, self, self.steps)

    def server_restarted(self, reply: AdmissionReply) -> None:
        """The global server was restarted, and rank 0 has entered again: join again."""
        coordinator = self._lead_coordinator
        if self.connection.loading:
            return  # the download is interrupted, and asked for again when all ranks know
        if reply.init_model:  # the server stopped before the first global model was on its disk
            self.connection.send_model()
        digest = self._first_digest if coordinator.version == 0 else None
        self.connection.send_control(coordinator.join(digest=digest))

    @property
    def _lead_coordinator(self) -> SiteCoordinator:
        assert self.coordinator is not None
        return self.coordinator

    @property
    def up_bytes(self) -> int:
        """Bytes of the messages to the global server."""
        return self.connection.up_bytes

    @property
    def down_bytes(self) -> int:
        """Bytes of the messages from the global server."""
        return self.connection.down_bytes

    # -- a step -----------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether the optimizer steps because this object asked it to."""
        return self.rank_step.busy

    def before_step(self) -> bool:
        """The user's optimizer is about to step with the gradients that backward left.

        Returns:
            Whether there is a gradient to step with: where gradients are shared, none may have come back yet.

        Raises:
            StrategyError: The optimizer is not the announced one any more.
            CheckpointError: The last checkpoint could not be written.
        """
        self._model.announced.check()
        if self.checkpoint is not None:
            self.checkpoint.look()
        if self.rank_step.exchanges or self._plan.shares_gradients:
            sparse_gradients.make_dense(self._model.optimizer)
        self.rank_step.before(self.steps)
        if self._plan.shares_gradients:
            self.shard.stepped(self.rank_step.gradients)
            self._decide()
            assert self._replica is not None
            return self._replica.before_step()
        if self.rank_step.exchanges:
            sparse_gradients.make_sparse(self._model.optimizer)
        return True

    def after_step(self) -> None:
        """The user's optimizer has stepped."""
        before = self.steps
        if self._replica is not None:
            self._replica.stepped()
            before = self._steps_before
        else:
            self.rank_step.after()
            self.shard.stepped(None)
            self.steps += 1
            if self.steps >= self._next_decision:
                self._decide()
            elif self.coordinator is not None:
                self.coordinator.step_done(self.connection.now)
            self.rank_step.for_passes()
        self._write_checkpoint(before)
        if self._progress is not None and self.coordinator is not None:
            self._progress.after_step(self.steps, self.coordinator.schedule.current)

    def _write_checkpoint(self, before: int) -> None:
        every = self._options.checkpoint_every
        if self.checkpoint is not None and self.steps // every > before // every:  # a late site may skip some steps
            self.rank_step.for_rounds()
            with self._replica.at_global_model() if self._replica is not None else nullcontext():
                self.checkpoint.write(self.steps, self.coordinator)
            self.rank_step.for_passes(release=False)

    def _decide(self) -> None:
        """Let rank 0 decide what happens after this step, and do it."""
        self._steps_before = self.steps
        if self.coordinator is not None:
            self._lead(self._after_step)
        else:
            self._follow()

    # -- rank 0 leads -----------------------------------------------------------------------

    def _lead(self, work: Callable[[], None]) -> None:
        """Decide something as rank 0; the other ranks hear of it, also if it fails."""
        coordinator = self._lead_coordinator
        self._begin_round()
        try:
            work()
        except BaseException as error:
            self._tell(Abandon(why=str(error)))
            raise
        self._next_decision = coordinator.next_decision()
        self._tell(Continue(step=self.steps, next_decision=self._next_decision))
        self._end_round()  # as the other ranks do now: it exchanges weights with them

    def _tell(self, order: SiteOrder) -> None:
        if self._group.size > 1:
            self._group.bytes_from_first(to_bytes(order))

    def _order(self, order: SiteOrder) -> None:
        """Have every rank do something."""
        self._tell(order)
        self._do(order)

    def _after_step(self) -> None:
        coordinator, connection = self._lead_coordinator, self.connection
        coordinator.rate = self._model.announced.rate if self._plan.shares_gradients else None
        coordinator.step_timer.trip = connection.trip_s
        found = coordinator.after_step(connection.now, self._measure)
        if found is None or found[1] is None:
            if self._plan.shares_gradients:
                self._order(Keep())
            if found is not None:
                self._push(found[0], None)
        else:
            self._push(*found)
        self._wait_until_unblocked()
        self.steps = coordinator.progress.step

    def _push(self, push: Push, order: PushOrder | None) -> None:
        self.connection.send_control(push)
        self._order(PushNothing(round=push.round) if order is None else order)

    def _measure(self) -> tuple[float, float]:
        self._order(Measure())
        since, last = self._squares
        return since, last

    def _wait_until_unblocked(self) -> None:
        """Apply the results that have come, and wait for those that training needs before its next step."""
        coordinator, connection = self._lead_coordinator, self.connection
        downloads = coordinator.full_downloads
        self._pump(0.0)
        began, why = time.monotonic(), coordinator.blocked(connection.now)
        first, told = why, began
        if first == "stall":
            log.warning(
                "%s stalls after step %d: the global server has been silent for more than t = %g s; the workers get "
                "no new weights until it is heard",
                *(self.name, coordinator.progress.step, self._plan.t),
            )
        while why is not None:
            self._pump(_POLL_S)
            if time.monotonic() - told > _WAIT_TOLD_S:
                self._tell(Wait())
                told = time.monotonic()
            why = None if coordinator.finished else coordinator.blocked(connection.now)
        if first is not None:
            seconds = time.monotonic() - began
            self.waited += seconds
            connection.telemetry.waited_for_server(coordinator.progress.step, seconds, first)
        connection.telemetry.metrics.update(coordinator)
        if coordinator.full_downloads != downloads:
            connection.telemetry.downloaded(coordinator.version, exact=coordinator.exact)

    def _pump(self, timeout: float) -> None:
        """Handle what has come, and apply the results that are due."""
        coordinator, connection = self._lead_coordinator, self.connection
        connection.poll(timeout)
        while (message := connection.control()) is not None:
            if isinstance(message, JoinReply) and message.downloads and coordinator.joined and not coordinator.exact:
                self._exact_follows = message  # training goes on until all of it is here
            else:
                self._receive(message)
        if (reply := self._exact_follows) is not None and connection.has_download():
            self._exact_follows = None
            version, step = coordinator.version, coordinator.global_step
            self._receive(replace(reply, version=version, step=step) if version > reply.version else reply)
        while (found := coordinator.next_result(self._all_have)) is not None:
            self._order(Apply(order=found[0], rate=found[1].rate))

    def _all_have(self, version: int) -> bool:
        """Whether every rank has all values of a result."""
        if not self.connection.has_result(version):
            return False
        self._order(Look(version=version))
        return self._all_there

    def _receive(self, message: Message) -> None:
        coordinator = self._lead_coordinator
        messages, order = coordinator.receive(message, self.connection.now)
        if order is not None and isinstance(message, JoinReply):
            self._order(Load.of(order, message))
            if not self._all_there:  # a server process was restarted: all ranks need the download once more
                messages = [coordinator.join(same_start=False)]
        elif isinstance(message, RoundResult):
            self._release(message)
        self._send(messages)

    def _release(self, result: RoundResult) -> None:
        """Free the site's own push, where its result is waited for and does without it."""
        through = result.included.get(self.name)
        waits = not self._lead_coordinator.overlap and not self._plan.shares_gradients
        if through is not None and waits and not result.relayed:
            self._order(Release(through=through))

    def _send(self, messages: list[Message]) -> None:
        for message in messages:
            assert not isinstance(message, ModelPart)
            self.connection.send_control(message)  # type: ignore[arg-type]

    # -- every rank does what was decided -----------------------------------------------------

    def _follow(self) -> None:
        """Do what rank 0 says, until it says to go on."""
        self._begin_round()
        self.connection.poll()
        while True:
            order = parse(self._group.bytes_from_first(b""))
            if isinstance(order, Continue):
                break
            if isinstance(order, Abandon):
                raise RefusedError(f"rank 0 of {self.name} could not go on: {order.why}")
            self._do(order)
        self._end_round()
        self.steps, self._next_decision = order.step, order.next_decision

    def _begin_round(self) -> None:
        self._moved = False
        self._redistributed = False

    def _work(self) -> None:
        """Before weights are read or written: bring them into the form that rounds work on."""
        if not self._redistributed:
            self._redistributed = True
            self.rank_step.for_rounds()
            self._model.weights.begin()
            if self._plan.shares_gradients:
                self.rank_step.gradients.begin()

    def _end_round(self) -> None:
        if self._redistributed:
            if self._moved and not self.rank_step.releases_weights:
                self._share.share()
            self._model.weights.end(changed=self._moved)
            if self._plan.shares_gradients:
                self.rank_step.gradients.end(changed=True)
            self._redistributed = False
            self.shard.scratch.clear()  # memory for pieces is not kept between rounds
        if self._moved:
            self._average_buffers()

    def _do(self, order: SiteOrder) -> None:
        if isinstance(order, PushOrder):
            self._work()
            gradient = self.rank_step.gradients if self._plan.shares_gradients and not order.final else None
            self.connection.send_push(order.round, self.shard.stream_push(order, gradient))
            self._moved |= order.places
        elif isinstance(order, PushNothing):
            self.shard.in_flight[order.round] = ()
            self.connection.send_push(order.round, ())
        elif isinstance(order, Apply):
            self._work()
            result = RoundResult(version=order.order.version, round=0, step=0, rate=order.rate)
            self.shard.apply(order.order, self.connection.take_result(result))
            self._moved |= not self._plan.shares_gradients
        elif isinstance(order, Load):
            self._work()
            loaded = self.connection.load(order.order, self.shard, order.join_reply())
            self._all_there = not self._group.maximum(0 if loaded else 1)
            self._moved = True
        elif isinstance(order, Measure):
            since, last = self.shard.squares()
            self._squares = self._group.sums([since, last])
        elif isinstance(order, Look):
            if not self.connection.has_result(order.version):
                self.connection.poll()
            there = self.connection.has_result(order.version)
            self._all_there = not self._group.maximum(0 if there else 1)
        elif isinstance(order, Release):
            self.shard.release(order.through)
        elif isinstance(order, Keep):
            self._work()
            self.shard.keep(self.rank_step.gradients)
        elif isinstance(order, Wait):
            self.connection.poll()

    def _average_buffers(self) -> None:
        if self._model.averages_buffers and self._group.size > 1:
            for buffer in self._model.buffers:
                buffer.copy_(self._group.mean(buffer.float().flatten()).view(buffer.shape))

    def digest(self) -> str:
        """The digest of the site's global model; called on every rank."""
        if isinstance(self.shard, UpdateShard):
            own = digest_of(self.shard.global_model, self.shard.held)
        else:
            own = self._own_digest()
        return f"{self._group.whole_sum(own):016x}"

    # -- what users say -----------------------------------------------------------------------

    def note(self, loss: float) -> None:
        """Write the loss of the last step into the event log, on the rank that has one."""
        if self._events is not None:
            self._events.write("step", self.connection.now, site=self.name, step=self.steps, loss=loss)

    def new_epoch(self) -> None:
        """Tell the dynamic significance threshold that an epoch has ended."""
        if self._plan.for_shard.measures:
            self._do(Measure())
            if self.coordinator is not None:
                self.coordinator.new_epoch(self._squares[1])
                self._write_threshold(self.coordinator)

    def _write_threshold(self, coordinator: SiteCoordinator) -> None:
        """Write the significance threshold G into the event log, where the trigger has one."""
        if self._events is not None and coordinator.threshold is not None:
            value = coordinator.threshold.value
            self._events.write("threshold", self.connection.now, site=self.name, step=self.steps, value=value)

    # -- the end ----------------------------------------------------------------------------

    def leave(self) -> None:
        """Send the residual, wait until the global model has it, and say goodbye.

        The model becomes the global one; quantized, where the strategy is judged by quantized weights.
        """
        if self.coordinator is not None:
            self._lead(self._finish)
        else:
            self._follow()
        self._show_global_model()
        if self.checkpoint is not None:
            self.checkpoint.write(self.steps, self.coordinator)
            self.checkpoint.wait()
        self._hand_over()
        if self.coordinator is not None:
            self.connection.send_control(Leave(site=self.name))
        self._write_end()
        self.connection.close()
        if self.coordinator is not None:
            log.info("%s leaves", self.name)

    def _finish(self) -> None:
        coordinator = self._lead_coordinator
        if not coordinator.finished:  # it is, if a site that had left is started again
            coordinator.rate = self._model.announced.rate if self._plan.shares_gradients else None
            self._push(*coordinator.finish(self.connection.now))
        self._wait_until_unblocked()

    def _show_global_model(self) -> None:
        """Give the module the global model."""
        if isinstance(self.shard, UpdateShard):
            self.rank_step.for_rounds()
            self._model.weights.begin()
            self._model.weights.write(self.shard.held, self.shard.global_model)
            self._share.share()
            self._model.weights.end(changed=True)
        elif self._replica is not None:
            self._replica.settle()
        self._average_buffers()

    def _hand_over(self) -> None:
        """Give the module the weights by which the strategy is judged, and the server what its final file needs.

        After the checkpoint, which has the weights of full precision.
        """
        layout = self._model.layout
        version = self._group.maximum(self.coordinator.version if self.coordinator is not None else 0)
        payloads = self.rank_step.quantized(derive(self._reply.seed, RunStream.EVALUATION, version))
        stages = len(self._model.weights.parameters) < len(layout.slots)
        buffers = all_buffers(self._model.module, self._group, stages=stages)
        if payloads is not None:
            self._model.weights.begin()
            self._model.weights.write(Intervals.whole(layout.numel), decode_flat(layout, payloads))
            self._model.weights.end(changed=True)
        if self.coordinator is None or (payloads is None and not buffers):
            return
        state = SiteFinalState.of(layout, payloads, buffers, version=version, samples=self.coordinator.samples)
        parts = state.parts(self.name)
        for part in parts:
            self.connection.send_control(part)
        self.connection.wait_sent(sum(len(part.data) for part in parts))

    def _write_end(self) -> None:
        """Write how the site has done, all ranks together; called on every rank."""
        sockets = self.connection.socket_bytes()
        own = [self.connection.up_bytes, self.connection.down_bytes, self._group.sent_bytes]
        own += [0, 0, 0] if sockets is None else [1, sockets["sent"], sockets["received"]]
        up, down, lan, counted, sent, received = (int(total) for total in self._group.sums(own))
        if self._events is None:
            return
        self._events.write(
            "site",
            self.connection.now,
            site=self.name,
            steps=self.steps,
            waiting_seconds=self.waited,
            up_bytes=up,
            down_bytes=down,
            lan_bytes=lan,
            socket_bytes={"sent": sent, "received": received} if counted else None,
        )
        self._events.close()

    def abandon(self) -> None:
        """Tell the server that this site is gone, without its residual and without the other ranks.

        Never raises a WeightGradError: it is called where another error is on its way.
        """
        if self.joined:
            with suppress(WeightGradError):
                self.connection.send_control(Leave(site=self.name))
                log.warning("%s leaves before its training is over", self.name)
        if self.checkpoint is not None:
            with suppress(WeightGradError):
                self.checkpoint.wait()

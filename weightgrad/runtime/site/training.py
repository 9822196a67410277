"""One rank's part in a run, from admission to leaving: what happens around the steps of the user's optimizer.

Rank 0 leads (`leader.py`): it has the coordinator, decides, and tells the other ranks. Every rank does what was decided
for the elements that it holds (`rank_work.py`). Between two decisions a step is the user's own: it is counted, and that
is all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from weightgrad.core import pieces
from weightgrad.core.global_model import segments_of
from weightgrad.core.local_model import gather
from weightgrad.core.random_streams import RunStream
from weightgrad.core.site.coordinator import SiteCoordinator
from weightgrad.core.site.shard import SiteShard
from weightgrad.core.site.update_shard import UpdateShard
from weightgrad.core.strategies import Strategy
from weightgrad.errors import WeightGradError
from weightgrad.event_log import EventLog
from weightgrad.kernels.noise import derive
from weightgrad.runtime.admission_messages import AdmissionReply
from weightgrad.runtime.checkpoints.checkpoint_files import newest_step
from weightgrad.runtime.checkpoints.named_state import NamedState
from weightgrad.runtime.checkpoints.portable_state import PortableState
from weightgrad.runtime.checkpoints.site_checkpoint import SiteCheckpoint
from weightgrad.runtime.join_options import JoinOptions
from weightgrad.runtime.model import left_weights, sparse_gradients
from weightgrad.runtime.model.device_state import check_local_server
from weightgrad.runtime.model.trained_model import TrainedModel
from weightgrad.runtime.optimizer.optimizer_set import set_of
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.site.departure import SiteDeparture
from weightgrad.runtime.site.leader import SiteLeader
from weightgrad.runtime.site.orders import Measure
from weightgrad.runtime.site.progress_log import ProgressLog, Tracker
from weightgrad.runtime.site.rank_connection import RankConnection
from weightgrad.runtime.site.rank_step import RankStep
from weightgrad.runtime.site.rank_work import RankWork
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_parts import model_parts
from weightgrad.wire.messages import Leave, ModelPart

log = logging.getLogger("weightgrad")


class SiteTraining:
    """Trains one rank's part of a site's model.

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
        self._steps_before = 0
        self._plan = self.strategy.for_site()
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
        if self.rank_step.releases_weights:
            check_local_server(model.memory, self.strategy)
        self._work = RankWork(self.name, self._plan, group, connection, model, self.rank_step, reply)
        self.leader: SiteLeader | None = None
        """Decides, on rank 0."""
        if group.first:
            coordinator = SiteCoordinator(self.name, self._plan, samples, download_codec=options.download_codec)
            coordinator.joining.epoch = connection.epoch
            coordinator.joining.replays = options.state is not None
            self.leader = SiteLeader(coordinator, self._work, group, connection, model.announced, events)
        self._state = NamedState(group, self.strategy, reply.seed, model, self.rank_step, self.shard)
        self.checkpoint = (
            None if options.state is None else SiteCheckpoint(options.state, self.name, group, self._state)
        )
        """Writes checkpoints, where `join` was given a directory."""
        if connection.server_watch is not None:
            connection.server_watch.kept = self._what_is_kept

    def _what_is_kept(self) -> str:
        """What a site that ends without its server leaves."""
        if self._options.state is None:
            return (
                f"{self.name} had done {self.steps} steps; what it has not shared is lost, as it has no state directory"
            )
        if self.checkpoint is not None:
            with suppress(WeightGradError):
                self.checkpoint.wait()
        step = newest_step(self._options.state)
        found = "no checkpoint" if step is None else f"its checkpoint of step {step}"
        return (
            f"{self.name} had done {self.steps} steps, and has {found} in {self._options.state}: when a server runs, "
            "the same command goes on from there"
        )

    # -- what others ask ----------------------------------------------------------------------

    @property
    def coordinator(self) -> SiteCoordinator | None:
        """The site's coordinator, on rank 0."""
        return None if self.leader is None else self.leader.coordinator

    @property
    def shard(self) -> SiteShard:
        """What this rank holds."""
        return self._work.shard

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return self._work.steps

    @property
    def waited(self) -> float:
        """Seconds that training has waited for the global server, on rank 0."""
        return 0.0 if self.leader is None else self.leader.waited

    @property
    def waits(self) -> Mapping[str, int]:
        """By name, how often training has waited long for other sites, or for the global server."""
        return self.connection.telemetry.waits

    @property
    def up_bytes(self) -> int:
        """Bytes of the messages to the global server."""
        return self.connection.up_bytes

    @property
    def down_bytes(self) -> int:
        """Bytes of the messages from the global server."""
        return self.connection.down_bytes

    @property
    def busy(self) -> bool:
        """Whether the optimizer steps because this object asked it to."""
        return self.rank_step.busy

    # -- the beginning ----------------------------------------------------------------------

    def begin(self, state: PortableState | None = None) -> None:
        """Go on from the checkpoint if there is one, join, and wait until the site may train.

        Args:
            state: What `state_dict` of an earlier process returned; it goes before the checkpoint.

        Raises:
            CheckpointError: The checkpoint is of another run.
            RefusedError: The server has lost the global model that this site has.
        """
        restored: int | None = None
        if state is not None:
            restored = state.restore(self._state, self.coordinator)
            if self.coordinator is not None:
                self.coordinator.joining.replays = True
        elif self.checkpoint is not None:
            restored = self.checkpoint.restore(self.coordinator)
        self._work.steps = 0 if restored is None else restored
        self.connection.begin(self.shard, self._first_parts)
        digest = self._group.whole_sum(self._model.digest()) if restored is None else None
        if self._plan.shares_gradients and restored is None:
            self._model.announced.begin_anew(say=self._group.first)
        if self._plan.shares_gradients:
            self._model.weights.begin()  # until the site has joined it may be asked for its first weights again
        if self._reply.init_model and restored is None:
            self.connection.send_model()
        if self.leader is not None:
            self._say_what_does_not_apply()
            leader, known = self.leader, left_weights.are_known(self._model.weights.parameters, digest)
            leader.lead(lambda: leader.join(digest, known=known))
            self._progress = ProgressLog(self.name, self, self.steps)
        else:
            self._work.follow()
        self._model.weights.end(changed=False)
        if self._work.replica is not None:
            self._work.replica.resume_passes()
        if restored is None or self._work.moved:
            self.rank_step.for_passes()
        else:
            self.rank_step.resume_passes()

    def _say_what_does_not_apply(self) -> None:
        if self.rank_step.not_applied:
            what = ", ".join(self.rank_step.not_applied)
            log.warning("%s averages gradients by itself: of %s no %s inside it", self.name, self.strategy.name, what)

    def _first_parts(self, served: Intervals) -> list[ModelPart]:
        """This rank's weights for one server process."""
        own = self._model.weights.held & served
        if isinstance(self.shard, UpdateShard):
            vector = gather(
                self.shard.global_model.cpu(), self.shard.held, own, torch.empty(own.numel, dtype=torch.float32)
            )
        else:
            vector = self._model.weights.read(own, torch.empty(own.numel, dtype=torch.float32))
        cut = pieces.cut(own, self._model.layout, per_tensor=False)
        return list(model_parts(0, [("weights", segments_of(vector, own, cut))]))

    def server_restarted(self, reply: AdmissionReply) -> None:
        """The global server was restarted, and rank 0 has entered again."""
        assert self.leader is not None
        self.leader.server_restarted(reply)

    # -- a step -----------------------------------------------------------------------------

    def before_step(self, number: int | None = None) -> bool:
        """The user's optimizer is about to step with the gradients that backward left.

        Args:
            number: Which of several optimizers, where gradients are shared.

        Returns:
            Whether there is a gradient to step with: where gradients are shared, none may have come back yet.

        Raises:
            StrategyError: The optimizer is not the announced one any more.
            CheckpointError: The last checkpoint could not be written.
        """
        self._model.announced.check()
        self._work.before_step()
        if self.checkpoint is not None:
            self.checkpoint.look()
        if self.rank_step.exchanges or self._plan.shares_gradients:
            sparse_gradients.make_dense(self._model.optimizer)
        several = None if number is None else set_of(self._model.optimizer)
        with nullcontext() if several is None else several.alone(number or 0):
            self.rank_step.before(self.steps)
            if self._work.replica is not None:
                self.shard.stepped(self.rank_step.gradients)
        if self._work.replica is not None:
            self.shard.within = self._of_optimizer(number)
            self._decide()
            self.shard.within = None
            return self._work.replica.before_step(number or 0)
        if self.rank_step.exchanges:
            sparse_gradients.make_sparse(self._model.optimizer)
        return True

    def _of_optimizer(self, number: int | None) -> Intervals | None:
        """The elements that one of several optimizers has."""
        several = set_of(self._model.optimizer)
        if number is None or several is None:
            return None
        return several.elements(self._model.weights.parameters, self._model.layout)[number]

    def after_step(self) -> None:
        """The user's optimizer has stepped."""
        before = self.steps
        if self._work.replica is not None:
            self._work.replica.stepped()
            before = self._steps_before
        else:
            self.rank_step.after()
            self.shard.stepped(None)
            self._work.steps += 1
            if self.steps >= self._work.next_decision:
                self._decide()
            elif self.coordinator is not None:
                self.coordinator.step_done(self.connection.now)
            self.rank_step.for_passes()
        self._write_checkpoint(before)
        if self._progress is not None and self.coordinator is not None:
            self._progress.after_step(self.steps, self.coordinator.version, self.coordinator.schedule.current)

    def _write_checkpoint(self, before: int) -> None:
        every = self._options.checkpoint_every
        if self.checkpoint is not None and self.steps // every > before // every:  # a late site may skip some steps
            self._work.finish_push()
            self.rank_step.for_rounds()
            replica = self._work.replica
            with replica.at_global_model() if replica is not None else nullcontext():
                self.checkpoint.write(self.steps, self.coordinator)
            self.rank_step.for_passes(release=False)

    def state_dict(self) -> bytes:
        """The site's state, put together from all ranks; called on every rank, between two steps."""
        self._work.finish_push()
        self.rank_step.for_rounds()
        replica = self._work.replica
        with replica.at_global_model() if replica is not None else nullcontext():
            found = PortableState.of(self._state, self._group, self.steps, self.coordinator)
        self.rank_step.for_passes(release=False)
        return found

    def _decide(self) -> None:
        """Let rank 0 decide what happens after this step, and do it."""
        self._steps_before = self.steps
        if self.leader is not None:
            self.leader.lead(self.leader.after_step)
        else:
            self._work.follow()

    # -- what users say -----------------------------------------------------------------------

    def note(self, loss: float | Tensor) -> None:
        """Note the loss of the last step, for lines of progress and, where there is one, for the event log."""
        if self._progress is not None:
            self._progress.note(loss)
        if self._events is not None:
            self._events.write("step", self.connection.now, site=self.name, step=self.steps, loss=float(loss))

    def stats(self) -> dict[str, Any]:
        """How the site is doing, on rank 0; on other ranks the steps they have done."""
        if self._progress is None or self.coordinator is None:
            return {"step": self.steps}
        found = self._progress.stats(self.steps, self.coordinator.version, self.coordinator.schedule.current)
        return found | {"waiting_for": self.connection.telemetry.waits_for()}

    def track(self, tracker: Tracker) -> None:
        """Give a tracker these numbers every few seconds and at the end, on rank 0."""
        if self._progress is not None:
            self._progress.track(tracker)

    def new_epoch(self) -> None:
        """Tell the dynamic significance threshold that an epoch has ended."""
        if self._plan.for_shard.measures:
            self._work.do(Measure())
            if self.leader is not None:
                self.leader.coordinator.new_epoch(self._work.squares[1])
                self.leader.write_threshold()

    def digest(self) -> str:
        """The digest of the site's global model; called on every rank."""
        return self._work.digest()

    # -- the end ----------------------------------------------------------------------------

    def leave(self, *, flush: bool = True, show_evaluated: Callable[[], None] = lambda: None) -> None:
        """Send the residual if `flush`, wait until the global model has it, and say goodbye.

        The model becomes the global one; quantized, where the strategy is judged by quantized weights.
        `show_evaluated` gives it those for evaluation, where its optimizer has other ones for that.
        """
        if self.leader is not None:
            leader = self.leader
            leader.lead(lambda: leader.finish(flush=flush))
        else:
            self._work.follow()
        if self._progress is not None and self.coordinator is not None:
            self._progress.tell_trackers(self.steps, self.coordinator.version, self.coordinator.schedule.current)
        departure = SiteDeparture(self._work, self._group, self.connection, self._model, self.rank_step)
        departure.show_global_model()
        left_weights.remember(self._model.weights.parameters, self._group.whole_sum(self._model.digest()))
        if self.checkpoint is not None:
            self.checkpoint.write(self.steps, self.coordinator)
            self.checkpoint.wait()
        show_evaluated()
        departure.hand_over(self._reply.seed, self.coordinator)
        if self.leader is not None:
            self.connection.send_control(Leave(site=self.name))
        departure.write(self._events, self.name, self.waited)
        self.connection.close()
        if self._progress is not None:
            self._progress.leaves(self.steps)

    def abandon(self) -> None:
        """Tell the server that this site is gone, without its residual and without the other ranks.

        Never raises a WeightGradError: it is called where another error is on its way.
        """
        with suppress(WeightGradError):
            self._work.finish_push()
        if self.leader is not None and self.leader.joined:
            with suppress(WeightGradError):
                self.connection.send_control(Leave(site=self.name))
                log.warning("%s leaves before its training is over", self.name)
        if self.checkpoint is not None:
            with suppress(WeightGradError):
                self.checkpoint.wait()

"""One rank's part in a run, from admission to leaving: the step, the messages around it, checkpoints, the end."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from weightgrad import kernels
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.random_streams import RunStream
from weightgrad.core.site_state import SiteState
from weightgrad.core.strategies import Strategy
from weightgrad.errors import RefusedError, WeightGradError
from weightgrad.kernels.noise import derive
from weightgrad.runtime.admission import AdmissionReply
from weightgrad.runtime.announced_optimizer import AnnouncedOptimizer
from weightgrad.runtime.entry import Entry
from weightgrad.runtime.flat_parameters import FlatParameters
from weightgrad.runtime.join_options import JoinOptions
from weightgrad.runtime.link_monitor import LinkMonitor
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.progress_log import ProgressLog
from weightgrad.runtime.rank_step import RankStep
from weightgrad.runtime.server_connection import ServerConnection
from weightgrad.runtime.site_checkpoint import RunIdentity, SiteCheckpoint
from weightgrad.wire.messages import InitModel, Leave

log = logging.getLogger("weightgrad")


@dataclass(frozen=True)
class TrainedModel:
    """What a rank trains: parameters, optimizer, and the buffers that are averaged over the ranks or kept."""

    flat_parameters: FlatParameters
    optimizer: Optimizer
    announced: AnnouncedOptimizer
    buffers: list[Tensor]
    averages_buffers: bool


class SiteTraining:
    """Trains one rank's replica of a site's model. Rank 0 also has the site's state and the connection.

    Args:
        options: What `join` was given.
        group: The ranks of the site.
        entry: The admission; on rank 0 it has the connection to the server.
        model: What is trained.
        weights: The first weights of the model, flat.
        reply: The server's reply to the admission request.
        samples: How much the site's updates weigh.
    """

    def __init__(
        self,
        options: JoinOptions,
        group: SiteGroup,
        entry: Entry,
        model: TrainedModel,
        weights: Tensor,
        reply: AdmissionReply,
        samples: int,
    ) -> None:
        self._options, self._group, self._model, self._reply = options, group, model, reply
        self.name, self.strategy = options.site, Strategy(**reply.strategy)
        self._connection, self._events = entry.connection, entry.events
        self._progress: ProgressLog | None = None
        self.steps = 0
        self.joined = False
        """Whether the server has been sent a Join, so that it must be sent a Leave."""
        self.state = self._site_state(weights, samples) if group.first else None
        self._weights = weights if self.state is None else self.state.model
        self.rank_step = RankStep(
            model.flat_parameters,
            model.optimizer,
            self._weights,
            self.strategy,
            group,
            derive(reply.seed, RunStream.LOCAL_STEP, reply.number),
            clip_norm=reply.clip_norm,
        )
        self.checkpoint: SiteCheckpoint | None = None
        if options.state is not None:
            identity = RunIdentity(self.strategy, reply.seed, model.flat_parameters.layout)
            self.checkpoint = SiteCheckpoint(
                options.state, self.name, group, identity, self.rank_step, self.state, model.buffers
            )

    def _site_state(self, weights: Tensor, samples: int) -> SiteState:
        announced, reply = self._model.announced, self._reply
        layout, spec = self._model.flat_parameters.layout, announced.spec(self.strategy)
        global_model = GlobalModel(layout, weights, optimizer=spec, rate=lambda step: announced.rate)
        return SiteState(
            self.name,
            global_model,
            self.strategy.for_site(),
            samples,
            derive(reply.seed, RunStream.SITE_STATE, reply.number),
            download_codec=self._options.download_codec,
        )

    # -- the beginning ----------------------------------------------------------------------

    def begin(self) -> None:
        """Go on from the checkpoint if there is one, join, and wait until the site may train.

        Raises:
            CheckpointError: The checkpoint is of another run.
            RefusedError: The server has lost the global model that this site has.
        """
        if self._group.first:
            self._warn()
        steps = self.checkpoint.restore() if self.checkpoint is not None else None
        self.steps = self.steps if steps is None else steps
        if self._connection is not None and self.state is not None:
            self._join(self._connection, self.state)
        self.steps = self._group.number_from_first(self.steps)
        self._spread_weights(True)
        self.rank_step.show_weights(again=steps is not None)

    def _warn(self) -> None:
        if kernels.status().backend != "native":
            log.warning(
                "%s: codecs run on their torch reference implementations, which are slower: %s",
                self.name,
                kernels.status(),
            )
        if (line := self.rank_step.not_applied) is not None:
            log.warning("%s: %s", self.name, line)

    def _join(self, connection: ServerConnection, state: SiteState) -> None:
        connection.attach(state)
        connection.watch = LinkMonitor(self.name, self._reply.facts.get("bit_s"))
        if self._events is not None:
            self._events.write("start", connection.now, site=self.name, step=state.step, pushed=state.pushed)
        connection.start()
        version = state.global_model.version
        if self._reply.init_model and version > 0:
            raise RefusedError(
                f"{self.name} has global model version {version} and the server none: it was started without its "
                "state. Start it with that, or begin the run anew with empty states"
            )
        if self._reply.init_model:
            connection.init_model(InitModel(site=self.name, snapshot={"weights": state.global_model.vector}))
        connection.send(state.join(same_start=self._reply.same_start or version > 0))
        self.joined = True
        connection.wait_until_unblocked()
        self.steps = state.step
        log.info("%s joins with global model version %d", self.name, state.global_model.version)
        self._progress = ProgressLog(self.name, connection, self.steps)

    # -- a step -----------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether the optimizer steps because this object asked it to."""
        return self.rank_step.updater.busy

    def step(self) -> None:
        """Take the site's next step with the gradients that backward left; then they are dropped.

        Raises:
            StrategyError: The optimizer is not the announced one any more.
            CheckpointError: The last checkpoint could not be written.
        """
        self._model.announced.check()
        if self.checkpoint is not None:
            self.checkpoint.writer.look()
        gradient, before = self.rank_step.step(self.steps), self.steps
        self.steps += 1
        moved = gradient is not None
        if self.state is not None and self._connection is not None:
            moved = self._after_step(self._connection, self.state, gradient)
        self.steps = self._group.number_from_first(self.steps)
        if self._spread_weights(moved):
            self._average_buffers()
        self.rank_step.show_weights()
        self._model.flat_parameters.drop_gradients()
        every = self._options.checkpoint_every
        if self.checkpoint is not None and self.steps // every > before // every:  # a late site may skip some steps
            self.checkpoint.write(self.steps)
        if self._progress is not None and self.state is not None:
            self._progress.after_step(self.steps, self.state.schedule)

    def _after_step(self, connection: ServerConnection, state: SiteState, gradient: Tensor | None) -> bool:
        """Send what the strategy sends now, apply what has come; whether the other ranks' weights are outdated."""
        state.rate = self._model.announced.rate if self.strategy.shares == "gradients" else None
        connection.send(state.after_step(connection.now, gradient))
        moved = connection.wait_until_unblocked() or gradient is not None or state.residual_removed
        self.steps = state.step
        return moved

    def _spread_weights(self, moved: bool) -> bool:
        """Broadcast rank 0's weights if something other than the common step has moved them; whether it had."""
        moved = bool(self._group.number_from_first(int(moved)))
        if moved:
            self._group.from_first(self._weights)
        return moved

    def _average_buffers(self) -> None:
        if self._model.averages_buffers and self._group.size > 1:
            for buffer in self._model.buffers:
                buffer.copy_(self._group.mean(buffer.float().flatten()).view(buffer.shape))

    def note(self, loss: float) -> None:
        """Write the loss of the last step into the event log, on the rank that has one."""
        if self._events is not None and self._connection is not None:
            self._events.write("step", self._connection.now, site=self.name, step=self.steps, loss=loss)

    def new_epoch(self) -> None:
        """Tell the dynamic significance threshold that an epoch has ended."""
        if self.state is not None:
            self.state.new_epoch(self._model.announced.rate)

    # -- the end ----------------------------------------------------------------------------

    def leave(self) -> None:
        """Send the residual, wait until the global model has it, and say goodbye. The model becomes the global one."""
        self.rank_step.close()
        if self.state is not None and self._connection is not None:
            self._finish(self._connection, self.state)
        elif self.checkpoint is not None:
            self.checkpoint.writer.wait()
        self._spread_weights(True)
        self._average_buffers()
        self._model.flat_parameters.write_weights(self._weights)

    def _finish(self, connection: ServerConnection, state: SiteState) -> None:
        if not state.finished:  # it is, if a site that had left is started again
            connection.send(state.finish(connection.now))
        connection.wait_until_unblocked()
        if self.checkpoint is not None:
            self.checkpoint.write_own(self.steps)
            self.checkpoint.writer.wait()
        connection.send([Leave(site=self.name)])
        self._weights.copy_(state.global_model.vector)
        self._write_end(connection)
        connection.close()
        log.info("%s leaves", self.name)

    def _write_end(self, connection: ServerConnection) -> None:
        if self._events is None:
            return
        self._events.write(
            "site",
            connection.now,
            site=self.name,
            steps=self.steps,
            waiting_seconds=connection.waited,
            up_bytes=connection.up_bytes,
            down_bytes=connection.down_bytes,
            lan_bytes=self._group.sent_bytes,
            encoded_ahead=self.rank_step.eager.share if self.rank_step.eager is not None else 0.0,
            socket_bytes=connection.socket_bytes(),
        )
        self._events.close()

    def abandon(self) -> None:
        """Tell the server that this site is gone, without its residual and without the other ranks.

        Never raises a WeightGradError: it is called where another error is on its way.
        """
        self.rank_step.close()
        if self.joined and self._connection is not None:
            with suppress(WeightGradError):
                self._connection.send([Leave(site=self.name)])
                log.warning("%s leaves before its training is over", self.name)
        if self.checkpoint is not None:
            with suppress(WeightGradError):
                self.checkpoint.writer.wait()

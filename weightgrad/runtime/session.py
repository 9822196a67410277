"""The five lines of a training script: `join`, `prepare`, the usual loop, `leave`.

`prepare` returns the user's own model and optimizer and listens to `optimizer.step()` (`step_hooks`). Before the
optimizer steps, the ranks of the site exchange their gradients, where nothing else does that. After it, the step is
counted, and a round starts or ends if the strategy says it is time. Between rounds a step is the user's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor

from weightgrad.core import strategies
from weightgrad.core.strategies import Strategy
from weightgrad.errors import LinkError, RefusedError, StrategyError
from weightgrad.event_log import EventLog
from weightgrad.runtime.checkpoints.checkpoint_files import newest_version
from weightgrad.runtime.checkpoints.portable_state import PortableState
from weightgrad.runtime.join_options import JoinOptions
from weightgrad.runtime.model.host_tensors import on_host
from weightgrad.runtime.model.named_calls import NamedCalls
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.site import present_sites
from weightgrad.runtime.site.entry import Entry
from weightgrad.runtime.site.model_listeners import ModelListeners
from weightgrad.runtime.site.progress_log import show_by_default
from weightgrad.runtime.site.script_end import ScriptEnd
from weightgrad.runtime.site.training import SiteTraining
from weightgrad.runtime.site.user_model import UserModel

log = logging.getLogger("weightgrad")

Model = TypeVar("Model")
UserOptimizer = TypeVar("UserOptimizer")

_DEFAULTS: dict[str, Any] = {
    "strategy": None,
    "samples": 1,
    "buffers": "shared",
    "frozen": "same",
    "stages": False,
    "state_on": "host",
    "changes": {},
}


class Site:
    """This process as a rank of its site. Made by `join`.

    As a context manager it leaves at the end of the block. If the block raises, the server is told at once that the
    site is gone, the residual is not sent, and the error goes on.
    """

    def __init__(self, options: JoinOptions) -> None:
        self.name = options.site
        self.group = SiteGroup()
        """The ranks of the site."""
        self.strategy: Strategy | None = None
        """The strategy of the run, once `prepare` has heard of it."""
        self._options = options
        self._entry: Entry | None = None
        self._training: SiteTraining | None = None
        self._listeners: ModelListeners | None = None
        self._calls: NamedCalls | None = None
        self._loaded: PortableState | None = None
        self._script_end = ScriptEnd(self._abandon, resumable=options.state is not None)
        self._left = False

    # -- the beginning ----------------------------------------------------------------------

    def prepare(
        self,
        model: Model,
        optimizer: UserOptimizer,
        strategy: str | Strategy | None = None,
        *,
        name: str | None = None,
        samples: int = 1,
        buffers: str = "shared",
        frozen: str = "same",
        stages: bool = False,
        state_on: str = "host",
        **changes: Any,
    ) -> tuple[Model, UserOptimizer]:
        """Enter the run with a model and its optimizer; called on every rank. Returns when the site may train.

        Args:
            model: Any module, also one that is wrapped (DistributedDataParallel, torch.compile, Accelerate); or several
                by name, such as {"g": generator, "d": discriminator}. Models that are sharded inside the site (FSDP2,
                HSDP, tensor parallelism) are recognized; each rank then takes part with its own shard.
            optimizer: A `torch.optim.Optimizer` with parameters of the model, or what wraps one (Accelerate,
                Lightning); or several, by name or in a list, each with parameters of its own. Where updates are shared,
                a step of the site is a step of each of them. Where gradients are shared, it is a step of one of them,
                and exchanges the gradients of its parameters; together they have all parameters that are trained.
            strategy: The strategy of the run, which must be the server's; None takes the server's.
            name: The name of the model, to give several one after the other, each with its optimizer. The site then
                enters the run when the first of them is called, or with `enter`, and not before.
            samples: How much the updates of this site weigh: the samples that it sees in one step.
            buffers: "shared" averages persistent buffers, such as the statistics of batch norm, over all sites, by
                `samples`; they travel with rounds. "site" averages floating-point buffers over the ranks of the site
                after every round, and no further; "local" leaves them to each rank.
            frozen: Parameters that are frozen now take no part. "same" refuses the site if the others have other values
                in them, and refuses steps once one is unfrozen; "local" compares nothing; "shared" lets them take part,
                so that they may be frozen and unfrozen while training goes on, with strategies that share updates.
            stages: The model is cut by layers, so that every rank has parameters of its own
                (torch.distributed.pipelining). The ranks must keep the names that the parameters have in the whole
                model.
            state_on: Where this site keeps its global model and its residual, and encodes: "host", or "device", which
                is where the parameters are. The bits are the same. On an accelerator "device" takes 8 bytes of its
                memory a parameter, and only encoded bytes cross to the host; a few strategies are refused there.
            **changes: Parts of the strategy that differ from its preset, as at the server.

        Returns:
            The same model and optimizer. The model has the weights of the global model, or with `name` will have.

        Raises:
            StrategyError: The strategy, the optimizer or an argument does not fit, or the site is prepared already.
            RefusedError: The server did not admit the site, for example because it has another model.
            LinkError: The server could not be reached within the timeout of `join`, or `metrics` cannot be listened on.
            CheckpointError: The checkpoint in `state` is damaged or of another run.
        """
        if self._left:
            raise StrategyError("the site has left; call weightgrad.join again to come back")
        if self._listeners is not None:
            raise StrategyError(
                "the site is prepared already; to train several models, give prepare() all of them "
                'at once, as {"g": g, "d": d}, or each with its name before the first of them is called; to train '
                "another one, leave() and join again"
            )
        given: dict[str, Any] = {
            "strategy": strategy,
            "samples": samples,
            "buffers": buffers,
            "frozen": frozen,
            "stages": stages,
        }
        given |= {"state_on": state_on, "changes": changes}
        if name is not None:
            self._calls = NamedCalls(self.enter) if self._calls is None else self._calls
            self._calls.add(name, model, optimizer, {k: v for k, v in given.items() if v != _DEFAULTS[k]})
        elif self._calls is not None:
            raise StrategyError("the site has models with names; give this one a name, too: prepare(..., name=...)")
        else:
            self._enter(model, optimizer, **given)
        return model, optimizer

    def enter(self) -> None:
        """Enter the run with all models that were prepared by name; called on every rank. Else the first call does it.

        Call it where something reads the weights before any of the models computes, such as a copy of one.

        Raises:
            StrategyError: As `prepare`, which also has the other errors.
        """
        if self._calls is not None:
            calls, self._calls = self._calls, None
            models, optimizers, given = calls.take()
            self._enter(models, optimizers, **{**_DEFAULTS, **given})

    @on_host()
    def _enter(
        self,
        model: Any,
        optimizer: Any,
        *,
        strategy: str | Strategy | None,
        samples: int,
        buffers: str,
        frozen: str,
        stages: bool,
        state_on: str,
        changes: dict[str, Any],
    ) -> None:
        user = UserModel(model, optimizer, self.group, buffers=buffers, frozen=frozen, stages=stages, state_on=state_on)
        strategy = strategies.find(strategy, changes) if isinstance(strategy, str) else strategy
        if self.group.first:
            show_by_default()
        self._script_end.watch()
        self._entry = Entry(self._options, self.group)
        if strategy is not None:
            user.check_strategy(strategy)
        reply = self._entry.ask(
            user.layout, user.optimizer_told(), strategy, samples, self._kept_version(), user.frozen_digests()
        )
        self.strategy = Strategy(**reply.strategy)
        trained = user.trained(self.strategy, reply)
        connection = self._entry.connect(reply, trained.sharding.held)
        self._training = SiteTraining(
            self._options, self.group, connection, self._entry.events, trained, reply, samples
        )
        if self._training.coordinator is not None:
            self._entry.speak_for(self._training.coordinator, self._training.server_restarted)
        self._training.begin(self._loaded)
        self._loaded = None
        self._listeners = ModelListeners(user, optimizer, self.name, self._training, self.group)
        present_sites.add(self._options.address, self.name, self)

    def _kept_version(self) -> int:
        """The version of the global model from which this site can go on, on rank 0; -1 without one."""
        if not self.group.first:
            return -1
        return self._loaded.version if self._loaded is not None else newest_version(self._options.state)

    # -- while it trains --------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Optimizer steps done; above 0 right after `prepare` if the site goes on from its checkpoint."""
        self.enter()
        return self._training.steps if self._training is not None else 0

    @property
    def events(self) -> EventLog | None:
        """The site's event log, on rank 0 of a site with a `state` directory."""
        return self._entry.events if self._entry is not None else None

    @on_host()
    def digest(self) -> str:
        """A fingerprint of the site's global model, the one that the server logs after a round; called on every rank.

        Sites at the same version have the same, however differently they are sharded.

        Raises:
            StrategyError: The site has not been prepared.
        """
        self.enter()
        if self._training is None:
            raise StrategyError("the site has no global model before prepare()")
        return self._training.digest()

    @on_host()
    def state_dict(self) -> dict[str, Any]:
        """The state of the site, for a checkpoint of your own beside `model.state_dict()`; called on every rank.

        It holds all that the site needs to go on: weights and optimizer, what was not shared, pushes in flight. It is
        the same on every rank, and as large as those together, so that any number of ranks can load it. Before
        `prepare` it is empty, which is what torch.distributed.checkpoint needs to load one.

        Returns:
            A dictionary for `torch.save` or torch.distributed.checkpoint, which also takes the site itself.
        """
        return {
            "state": self._training.state_dict() if self._training is not None and self._listeners is not None else b""
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` of an earlier process returned; called on every rank, before `prepare`.

        `prepare` then gives model and optimizer what they had. If the others have gone on meanwhile, the site repeats
        the steps since, which the server knows already; then it catches up.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            StrategyError: The site is prepared already.
            CheckpointError: It cannot be read.
        """
        if self._training is not None:
            raise StrategyError(
                "load_state_dict() belongs before prepare(), which gives model and optimizer what they had; leave() "
                "and join again to go back to a checkpoint"
            )
        self._loaded = PortableState.read(state_dict.get("state"))

    def stats(self) -> dict[str, Any]:
        """How the site is doing: what the lines of progress say, as numbers. On ranks other than 0, only the step.

        Returns:
            `step`, `version` (of the global model), `loss` (the last that was noted, or None), `steps_per_second`,
            `up_bytes`, `down_bytes`, `waiting_seconds` and `waiting_share` (for the global server), `waiting_for` (the
            sites that a late round waits for now, or "the global server"; another thread may ask while training waits);
            with `auto` also `every`, `overlap` and `codec`, as they are now.
        """
        return self._training.stats() if self._training is not None else {"step": 0}

    def track(self, tracker: Callable[[dict[str, Any], int], None]) -> None:
        """Give a tracker `stats` every ten seconds and at the end, from rank 0.

        Args:
            tracker: One of `weightgrad.integrations.trackers`, or any function of a dictionary and a step.

        Raises:
            StrategyError: The site has not been prepared.
        """
        self.enter()
        if self._training is None:
            raise StrategyError("track() belongs after prepare(): before it there is nothing to tell")
        self._training.track(tracker)

    def note(self, loss: float | Tensor) -> None:
        """Note the loss of the last step, for lines of progress, trackers, and the event log of a site with `state`.

        Args:
            loss: The loss: a number, or a tensor of one, which is read when a line is written, and not before.

        Raises:
            StrategyError: The tensor has several values.
        """
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise StrategyError(
                f"note() was given a tensor of the shape {tuple(loss.shape)}; wanted the one loss of the step, such as "
                "site.note(loss.mean())"
            )
        if self._training is not None:
            self._training.note(loss)

    @on_host()
    def new_epoch(self) -> None:
        """Say that an epoch has ended, on every rank: the dynamic significance threshold follows the learning rate.

        Only strategies with a significance trigger use it; for others it does nothing.
        """
        if self._training is not None:
            self._training.new_epoch()

    # -- the end ----------------------------------------------------------------------------

    @on_host()
    def leave(self, *, flush: bool = True) -> None:
        """End the training of this site; called on every rank.

        What the site has learnt and not shared is sent, as fast as the line allows, with a line of progress in the log;
        the model becomes the global model, and the server is told that the site leaves. Where
        the strategy is judged by quantized weights (`evaluate = "quantized"`), the model gets those: the global model
        as this site quantizes it. Before `prepare` there is nothing to send; calling it twice does nothing.

        Args:
            flush: False sends nothing: what was not shared is lost to the others, and `leave` returns sooner.

        Raises:
            StrategyError: The model has other weights than the last step has left.
            RefusedError: The server has ended the session.
            CheckpointError: The last checkpoint could not be written.
        """
        if self._left:
            return
        if self._calls is not None:
            self._calls.take()
            self._calls = None
        if self._training is None or self._listeners is None:
            self._abandon()
            return
        if self._listeners.interrupted:
            log.warning(
                "%s leaves with the weights that it has: a step has ended in the middle, and what was not shared is "
                "lost. The other sites go on with the global model",
                self.name,
            )
            self._abandon()
            return
        self._listeners.end_steps()
        try:
            self._training.leave(flush=flush, show_evaluated=self._listeners.show_evaluated)
        except (LinkError, RefusedError):  # there is no session any more that could be left in order
            self._abandon()
            raise
        self._has_left()
        self._listeners.release()
        self._training.rank_step.release()
        self._listeners.stop_copying()
        if self._entry is not None:
            self._entry.close()

    def _has_left(self) -> None:
        self._left = True
        self._script_end.forget()
        present_sites.remove(self._options.address, self.name, self)

    @on_host()
    def _abandon(self) -> None:
        """Leave without the residual and without the other ranks: before `prepare`, and after an error."""
        if self._left:
            return
        self._has_left()
        if self._listeners is not None:
            self._listeners.release()
        if self._training is not None:
            self._training.abandon()
        if self._entry is not None:
            self._entry.hang_up()

    def __enter__(self) -> Site:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.leave()
        else:
            self._abandon()

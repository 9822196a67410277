"""The five lines of a training script: `join`, `prepare`, the usual loop, `leave`.

`prepare` returns the user's own model and optimizer and listens to `optimizer.step()`: before the optimizer moves
anything, the ranks of the site exchange their gradients and step together, and the local server (rank 0) exchanges
messages with the global server if the strategy says it is time. Then the gradients are dropped, so the optimizer's own
step finds nothing left to do.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from weightgrad.core import strategies
from weightgrad.core.site_state import SiteState
from weightgrad.core.strategies import Strategy
from weightgrad.errors import StrategyError
from weightgrad.event_log import EventLog
from weightgrad.runtime.announced_optimizer import AnnouncedOptimizer
from weightgrad.runtime.entry import Entry
from weightgrad.runtime.flat_parameters import FlatParameters, StagedFlatParameters
from weightgrad.runtime.join_options import JoinOptions, check_download_codec, find_credentials
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.progress_log import show_by_default
from weightgrad.runtime.rank_step import RankStep
from weightgrad.runtime.server_connection import ServerConnection
from weightgrad.runtime.site_checkpoint import SiteCheckpoint
from weightgrad.runtime.site_training import SiteTraining, TrainedModel

Model = TypeVar("Model", bound=nn.Module)
UserOptimizer = TypeVar("UserOptimizer", bound=Optimizer)


def join(
    address: str,
    *,
    site: str,
    credentials: str | Path | None = None,
    insecure: bool = False,
    state: str | Path | None = None,
    checkpoint_every: int = 50,
    streams: int = 4,
    timeout: float = 60.0,
    download_codec: str | None = None,
    metrics: str | None = None,
) -> Site:
    """Make this process a rank of a site; called on every rank. Nothing is sent before `Site.prepare`.

        with wg.join("gs.example.net:7443", site="virginia", credentials="certs/") as site:
            model, optimizer = site.prepare(model, optimizer)
            ...

    Args:
        address: HOST:PORT of the global server.
        site: The name of the site, one of those the server expects.
        credentials: The site's directory of certificates, or the directory in which all certificates were made.
        insecure: Use neither certificates nor encryption. Only for a server on this machine.
        state: The directory of the site's checkpoints, from which it goes on after a crash. Without it a site that is
            started again begins from the global model.
        checkpoint_every: Steps from one checkpoint to the next.
        streams: Connections that carry messages to the server in parallel, 1 to 64.
        timeout: Seconds to wait for a server that cannot be reached yet.
        download_codec: A codec without memory, such as "qsgd(bits=8)", for a site that joins late over a slow link.
            It gets its first model in that codec and begins to train after a fraction of the download; the exact
            global model follows while it trains and replaces the first, and no step is lost. It has no effect where
            no model must be sent.
        metrics: HOST:PORT on which rank 0 serves this site's /metrics and /healthz while it trains; None serves
            nothing.

    Returns:
        The site, which can be used as a context manager.

    Raises:
        StrategyError: There are neither credentials nor `insecure`, or `insecure` is for another machine.
        LinkError: `address` is not HOST:PORT.
        CredentialsError: The credentials cannot be read, have expired, or are not this site's.
        SpecError: `download_codec` is no codec, or one with a memory.
    """
    check_download_codec(download_codec)
    options = JoinOptions(
        address=address,
        site=site,
        credentials=find_credentials(address, site, credentials, insecure),
        state=Path(state) if state is not None else None,
        checkpoint_every=checkpoint_every,
        streams=streams,
        timeout=timeout,
        download_codec=download_codec,
        metrics=metrics,
    )
    return Site(options)


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
        self._prepared = False
        self._left = False

    # -- the beginning ----------------------------------------------------------------------

    def prepare(
        self,
        model: Model,
        optimizer: UserOptimizer,
        strategy: str | Strategy | None = None,
        *,
        samples: int = 1,
        buffers: str = "site",
        stages: bool = False,
        **changes: Any,
    ) -> tuple[Model, UserOptimizer]:
        """Enter the run with a model and its optimizer; called on every rank. Returns when the site may train.

        Args:
            model: Any module. Parameters that are frozen now take no part.
            optimizer: An optimizer of `torch.optim` with parameters of the model. Strategies that share updates take
                any optimizer.
            strategy: The strategy of the run, which must be the server's; None takes the server's.
            samples: How much the updates of this site weigh: the samples that it sees in one step.
            buffers: "site" averages floating-point buffers, such as the statistics of batch norm, over the ranks of
                the site after every round; "local" leaves them to each rank. Buffers do not travel between sites.
            stages: The model is cut by layers, so that every rank has parameters of its own
                (torch.distributed.pipelining). FSDP2 and tensor parallelism are recognized without it.
            **changes: Parts of the strategy that differ from its preset, as at the server.

        Returns:
            The same model and optimizer. The model has the weights of the global model.

        Raises:
            StrategyError: The strategy, the optimizer or an argument does not fit.
            RefusedError: The server did not admit the site, for example because it has another model.
            LinkError: The server could not be reached within the timeout of `join`, or `metrics` cannot be listened on.
            CheckpointError: The checkpoint in `state` is damaged or of another run.
        """
        if self._left:
            raise StrategyError("the site has left; call weightgrad.join again to come back")
        if buffers not in ("site", "local"):
            raise StrategyError(f'buffers = {buffers!r}; it is "site" or "local"')
        flat_parameters = StagedFlatParameters(model, self.group) if stages else FlatParameters(model)
        _check_parameters(flat_parameters, optimizer)
        announced = AnnouncedOptimizer(optimizer, flat_parameters.parameters)
        strategy = strategies.find(strategy, changes) if isinstance(strategy, str) else strategy
        weights = torch.zeros(flat_parameters.layout.numel)
        flat_parameters.read_weights(weights)
        if self.group.first:
            show_by_default()
        self._entry = Entry(self._options, self.group)
        reply = self._entry.enter(flat_parameters, weights, announced, strategy, samples)
        self.strategy = Strategy(**reply.strategy)
        if stages:
            _check_stages(self.strategy)
        announced.adapt(self.strategy, say=self.group.first)
        trained = TrainedModel(
            flat_parameters,
            optimizer,
            announced,
            buffers=[b for b in model.buffers() if b.is_floating_point()],
            averages_buffers=buffers == "site" and not stages,  # ranks with other layers have other buffers
        )
        self._training = SiteTraining(self._options, self.group, self._entry, trained, weights, reply, samples)
        self._training.begin()
        self._prepared = True
        optimizer.register_step_pre_hook(self._before_step)
        return model, optimizer

    # -- while it trains --------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Optimizer steps done; above 0 right after `prepare` if the site goes on from its checkpoint."""
        return self._training.steps if self._training is not None else 0

    @property
    def events(self) -> EventLog | None:
        """The site's event log, on rank 0 of a site with a `state` directory."""
        return self._entry.events if self._entry is not None else None

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called by torch before each `optimizer.step()`."""
        del optimizer
        training = self._training
        assert training is not None
        if training.busy:
            return
        if self._left:
            raise StrategyError("the site has left; an optimizer.step() after leave() would train alone")
        if any(given is not None for given in (*args[1:], kwargs.get("closure"))):
            raise StrategyError("optimizer.step(closure) would train alone; call backward() before optimizer.step()")
        training.step()

    def note(self, loss: float) -> None:
        """Write the loss of the last step into the site's event log; does nothing on ranks without one.

        Args:
            loss: The loss, a number.
        """
        if self._training is not None:
            self._training.note(loss)

    def new_epoch(self) -> None:
        """Say that an epoch has ended, on every rank: the dynamic significance threshold follows the learning rate.

        Only strategies with a significance trigger use it; for others it does nothing.
        """
        if self._training is not None:
            self._training.new_epoch()

    # -- the end ----------------------------------------------------------------------------

    def leave(self) -> None:
        """End the training of this site; called on every rank.

        The residual is sent, the model becomes the global model, and the server is told that the site leaves. Before
        `prepare` there is nothing to send; calling it twice does nothing.

        Raises:
            RefusedError: The server has ended the session.
            CheckpointError: The last checkpoint could not be written.
        """
        if self._left:
            return
        if self._training is None or not self._prepared:
            self._abandon()
            return
        self._training.leave()
        self._left = True

    def _abandon(self) -> None:
        """Leave without the residual and without the other ranks: before `prepare`, and after an error."""
        self._left = True
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
        elif not self._left:
            self._abandon()

    # -- parts, for tests and tools ---------------------------------------------------------

    @property
    def _connection(self) -> ServerConnection | None:
        return self._entry.connection if self._entry is not None else None

    @property
    def _state(self) -> SiteState | None:
        return self._training.state if self._training is not None else None

    @property
    def _checkpoint(self) -> SiteCheckpoint | None:
        return self._training.checkpoint if self._training is not None else None

    @property
    def _rank_step(self) -> RankStep | None:
        return self._training.rank_step if self._training is not None else None


def _check_parameters(flat_parameters: FlatParameters, optimizer: Optimizer) -> None:
    ours = {id(parameter) for parameter in flat_parameters.parameters}
    if any(p.requires_grad and id(p) not in ours for group in optimizer.param_groups for p in group["params"]):
        raise StrategyError(
            "the optimizer has parameters that the model has not, and every worker would train them alone; put "
            "them into the model, and make the optimizer after fully_shard or parallelize_module"
        )


def _check_stages(strategy: Strategy) -> None:
    if strategy.shares == "gradients":
        raise StrategyError(
            f"{strategy.name} shares gradients, which one optimizer steps with; a model cut by layers has one "
            "on each rank. Take a strategy that shares updates, such as weightgrad or diloco"
        )

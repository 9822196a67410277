"""The five lines: `join`, `prepare`, the usual loop, `leave`.

`prepare` leaves the model and the optimizer the objects they are and listens to `optimizer.step()`: before the
optimizer moves anything, the workers of the site exchange their gradients, step together, and the local server
(rank 0) speaks with the global server if the strategy says it is time. Then the gradients are dropped, so
the optimizer's own step finds nothing left to do.
"""

from __future__ import annotations

import logging
import math
import secrets
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weightgrad import kernels
from weightgrad.errors import LinkError, RefusedError, StrategyError, WeightGradError
from weightgrad.kernels.noise import derive
from weightgrad.ledger import Ledger
from weightgrad.runtime import saved
from weightgrad.runtime.admission import Admission, Ask, read_admission
from weightgrad.runtime.bridge import Bridge, StagedBridge
from weightgrad.runtime.credentials import Credentials
from weightgrad.runtime.crew import Crew
from weightgrad.runtime.lan import Lan
from weightgrad.runtime.lanes_client import LanesClient
from weightgrad.runtime.link_watch import LinkWatch
from weightgrad.runtime.site_facts import described, digest, told_options
from weightgrad.runtime.site_keeper import RunKeys, SiteKeeper
from weightgrad.runtime.tls_check import diagnose, is_loopback, split
from weightgrad.runtime.wan_end import WanEnd
from weightgrad.site.described import Described
from weightgrad.wan import encoded_snapshot, strategies
from weightgrad.wan.base import Base
from weightgrad.wan.messages import Leave, Plant
from weightgrad.wan.site_end import SiteEnd
from weightgrad.wan.strategies import Strategy

log = logging.getLogger("weightgrad")

Model = TypeVar("Model", bound=nn.Module)
Stepper = TypeVar("Stepper", bound=Optimizer)


def join(
    address: str,
    *,
    site: str,
    credentials: str | Path | None = None,
    insecure: bool = False,
    state: str | Path | None = None,
    checkpoint_every: int = 50,
    lanes: int = 4,
    patience: float = 60.0,
    first_base: str | None = None,
) -> Site:
    """Say which site this process belongs to, on every rank of it.

    `address` is the global server's HOST:PORT. `credentials` is the site's directory of certificates, or the one
    all of them were made in. `insecure` needs none, and is for a server on this machine. `state` is where the site
    writes what it needs to go on after a crash, every `checkpoint_every` steps; without it a restarted site
    begins again from the base. `patience` is how many seconds to wait for a server that is not there yet.

    `first_base` is for a site that comes late over a slow line: a codec without memory, such as "qsgd(bits=8)", in
    which it is sent its first base. It begins to train after a quarter of the download; the exact base follows while
    it trains and takes the place of the first, with nothing lost of what the site has done. Where nothing must be sent,
    or a site comes back, it changes nothing.
    """
    if first_base is not None:
        encoded_snapshot.codec_of(first_base)  # a mistake is told here, and not by the server
    if credentials is None and not insecure:
        raise StrategyError(
            "join needs credentials=DIRECTORY (make them with `weightgrad certs init`), or insecure=True on one machine"
        )
    if split(address) is None:
        raise LinkError(f"{address!r} is not an address; write HOST:PORT, such as 127.0.0.1:7443")
    if insecure and not is_loopback(address):
        raise StrategyError(f"insecure is for a server on this machine, such as 127.0.0.1:7443, and not for {address}")
    found = Credentials.load(Path(credentials), site=site) if credentials is not None else None
    if found is None:
        log.warning("INSECURE: no certificates, no encryption; for trying things out on one machine only")
    directory = Path(state) if state is not None else None
    return Site(address, site, found, directory, checkpoint_every, lanes, patience, first_base)


class Site:
    """This process as a worker of its site. Made by `join`."""

    def __init__(
        self,
        address: str,
        name: str,
        credentials: Credentials | None,
        state: Path | None,
        checkpoint_every: int,
        lanes: int,
        patience: float,
        first_base: str | None = None,
    ) -> None:
        self.name = name
        self.lan = Lan()
        self._address, self._credentials, self._patience, self._lanes = address, credentials, patience, lanes
        self._state, self._every, self._first_base = state, checkpoint_every, first_base
        self.ledger: Ledger | None = None
        self.strategy: Strategy | None = None
        self.steps = 0
        """Optimizer steps done; above 0 right after `prepare` when the site goes on from its state."""
        self._wan: WanEnd | None = None
        self._end: SiteEnd | None = None
        self._keeper: SiteKeeper | None = None
        self._left = False

    # -- the beginning ----------------------------------------------------------------------

    def prepare(
        self,
        model: Model,
        optimizer: Stepper,
        strategy: str | Strategy | None = None,
        *,
        samples: int = 1,
        buffers: str = "site",
        stages: bool = False,
        **changes: Any,
    ) -> tuple[Model, Stepper]:
        """Bind model and optimizer to the run, and return them.

        `strategy` must be that of the server (with the same changes to its row); None takes the server's. `samples`
        is how much this site's updates weigh: what it looks at in a step. `buffers`, such as the running statistics
        of batch norm, are averaged over the workers of a site after every round ("site"), or left to each ("local");
        they do not travel between sites. `stages` says that the model is cut by layers, so that every rank has
        parameters of its own (torch.distributed.pipelining); FSDP2 and tensor parallelism are seen by themselves.
        """
        if buffers not in ("site", "local"):
            raise StrategyError(f'buffers = {buffers!r}; it is "site" or "local"')
        self._bridge = StagedBridge(model, self.lan) if stages else Bridge(model)
        ours = {id(parameter) for parameter in self._bridge.parameters}
        if any(p.requires_grad and id(p) not in ours for group in optimizer.param_groups for p in group["params"]):
            raise StrategyError(
                "the optimizer has parameters that the model has not, and every worker would train them alone; put "
                "them into the model, and make the optimizer after fully_shard or parallelize_module"
            )
        self._optimizer = optimizer
        self._buffers = [b for b in model.buffers() if b.is_floating_point()]
        self._averages = buffers == "site" and not stages  # other layers have other buffers
        row = strategies.find(strategy, changes) if isinstance(strategy, str) else strategy
        weights = torch.zeros(self._bridge.layout.numel)
        self._bridge.read_weights(weights)
        admission = self._enter(weights, row, samples)
        self.strategy = Strategy(**admission.row)
        if stages and self.strategy.shares == "gradients":
            raise StrategyError(
                f"{self.strategy.name} shares gradients, which one optimizer steps with; a model cut by layers has one "
                "on each rank. Take a strategy that shares updates, such as weightgrad or diloco"
            )
        self._change_optimizer(self.strategy)
        self._told = told_options(optimizer) if self.strategy.shares == "gradients" else []
        self._begin(weights, admission, samples)
        optimizer.register_step_pre_hook(self._before_step)
        return model, optimizer

    def _enter(self, weights: Tensor, row: Strategy | None, samples: int) -> Admission:
        """Rank 0 asks; all hear the answer, or why there is none."""
        said = b""
        if self.lan.first:
            try:
                said = b"+" + self._ask(weights, row, samples).pack()
            except WeightGradError as error:
                self.lan.words_from_first(f"-{error}".encode())
                raise
        said = self.lan.words_from_first(said)
        if said[:1] != b"+":
            raise RefusedError(f"rank 0 of this site could not join: {said[1:].decode()}")
        return read_admission(said[1:])

    def _ask(self, weights: Tensor, row: Strategy | None, samples: int) -> Admission:
        client = LanesClient(
            self._address,
            site=self.name,
            incarnation=secrets.randbits(63),
            credentials=self._credentials.for_client() if self._credentials is not None else None,
            lanes=self._lanes,
            max_message=(room := max(1 << 30, 64 * self._bridge.layout.numel)),
            max_buffered=room + (64 << 20),
        )
        before = saved.newest(self._state, "rank-0") if self._state is not None else None
        ask = Ask(
            site=self.name,
            layout=[(slot.name, list(slot.shape)) for slot in self._bridge.layout.slots],
            digest=digest(weights),
            version=-1 if before is None else int(before.facts["version"]),
            samples=samples,
            workers=self.lan.size,
            row=row.row() if row is not None else None,
            optimizer=described(self._optimizer, self._bridge, row),
            kernels=str(kernels.status()),
        )
        if self._state is not None:
            self._state.mkdir(parents=True, exist_ok=True)
            self.ledger = Ledger(self._state / "ledger.jsonl", append=True)
        self._wan = WanEnd(client, ask, self.ledger, self._why_not)
        return self._wan.enter(patience=self._patience)

    def _why_not(self) -> str | None:
        why = diagnose(self._address, self._credentials)
        plain = self._credentials is None  # then a server without TLS is the right one
        return None if plain and why is not None and "as a TLS server" in why else why

    def _change_optimizer(self, strategy: Strategy) -> None:
        """DGC and momentum correction have the momentum inside what is sent: the optimizer must not have it again."""
        for group in self._optimizer.param_groups:
            for name, value in strategy.optimizer_with(group).items():
                if name != "params" and name in self._optimizer.defaults and group[name] != value:
                    if self.lan.first:
                        log.warning(
                            "%s: %s of the optimizer is now %s (was %s)", strategy.name, name, value, group[name]
                        )
                    group[name] = value

    def _begin(self, weights: Tensor, admission: Admission, samples: int) -> None:
        strategy, layout = Strategy(**admission.row), self._bridge.layout
        key = derive(admission.seed, 11, admission.number)
        if self.lan.first:
            assert self._wan is not None
            words = described(self._optimizer, self._bridge, strategy)
            source = Described.parse(words) if words is not None else None
            base = Base(layout, weights, optimizer=source, rate=lambda step: self._rate)
            own = derive(admission.seed, 10, admission.number)
            self._end = SiteEnd(self.name, base, strategy.for_site(), samples, own, first_base=self._first_base)
            self._wan.attach(self._end)
            self._wan.watch = LinkWatch(self.name, admission.facts.get("bit_s"))
            if kernels.status().backend != "native":
                log.warning("%s: codecs run on their torch twins, which are slower: %s", self.name, kernels.status())
            weights = self._end.model
        self._weights = weights
        self._crew = Crew(
            self._bridge, self._optimizer, weights, strategy, self.lan, key, clip_norm=admission.clip_norm
        )
        if self.lan.first and (line := self._crew.inside):
            log.warning("%s: %s", self.name, line)
        restored = self._restore(strategy, admission.seed)
        if self._wan is not None and self._end is not None:
            if self.ledger is not None:
                self.ledger.write("start", self._wan.now, site=self.name, step=self._end.step, pushed=self._end.pushed)
            self._wan.start()
            if admission.plant and self._end.base.version > 0:
                raise RefusedError(
                    f"{self.name} has base version {self._end.base.version} and the server none: it was started "
                    "without its state. Start it with that, or begin the run anew with empty states"
                )
            if admission.plant:
                self._wan.plant(Plant(self.name, {"base": self._end.base.vector}))
            same = admission.same_start or self._end.base.version > 0
            self._wan.send(self._end.join(same_start=same))
            self._wan.until_free()
            self.steps = self._end.step
        self.steps = self.lan.number_from_first(self.steps)
        self._spread(True)
        self._crew.show(again=restored)

    def _restore(self, strategy: Strategy, seed: int) -> bool:
        """Go on from the state, if there is one."""
        if self._state is None:
            return False
        keys = RunKeys(strategy, seed, self._bridge.layout)
        self._keeper = SiteKeeper(self._state, self.name, self.lan, keys, self._crew, self._end, self._buffers)
        steps = self._keeper.restore()
        self.steps = self.steps if steps is None else steps
        return steps is not None

    @property
    def _rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    # -- a step -----------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del optimizer
        if self._crew.mover.busy:
            return
        if self._left:
            raise StrategyError("the site has left; an optimizer.step() after leave() would train alone")
        if any(given is not None for given in (*args[1:], kwargs.get("closure"))):
            raise StrategyError("optimizer.step(closure) would train alone; call backward() before optimizer.step()")
        self._check_optimizer()
        if self._keeper is not None:
            self._keeper.beside.look()
        gradient, before = self._crew.step(self.steps), self.steps
        self.steps += 1
        moved = gradient is not None
        if self._end is not None and self._wan is not None:
            self._end.rate = self._rate if self.strategy is not None and self.strategy.shares == "gradients" else None
            self._wan.send(self._end.stepped(self._wan.now, gradient))
            moved = self._wan.until_free() or moved or self._end.let_go
            self.steps = self._end.step
        self.steps = self.lan.number_from_first(self.steps)
        if self._spread(moved):
            self._average_buffers()
        self._crew.show()
        self._bridge.drop_gradients()
        if self._keeper is not None and self.steps // self._every > before // self._every:  # a late site may leap
            self._keeper.write(self.steps)

    def _check_optimizer(self) -> None:
        """Replicas step with the optimizer as it was told to them; of it only the rate is told again."""
        for told, group in zip(self._told, self._optimizer.param_groups, strict=False):
            for name, value in told.items():
                wanted = value * self._rate if name == "lr" else value
                if group[name] != wanted and not (name == "lr" and math.isclose(group[name], wanted, rel_tol=1e-6)):
                    raise StrategyError(
                        f"{name} of the optimizer has become {group[name]} where the other sites have {wanted}: with "
                        "shared gradients only the rate may change, of all groups alike (OneCycleLR: "
                        "cycle_momentum=False). Or take a strategy that shares updates, such as weightgrad or diloco"
                    )

    def _spread(self, moved: bool) -> bool:
        """The local server's weights to the other ranks, when the WAN has moved them."""
        moved = bool(self.lan.number_from_first(int(moved)))
        if moved:
            self.lan.from_first(self._weights)
        return moved

    def _average_buffers(self) -> None:
        if self._averages and self.lan.size > 1:
            for buffer in self._buffers:
                buffer.copy_(self.lan.mean(buffer.float().flatten()).view(buffer.shape))

    def note(self, loss: float) -> None:
        """Write the loss of the last step into the site's ledger, on the rank that has one."""
        if self.ledger is not None and self._wan is not None:
            self.ledger.write("step", self._wan.now, site=self.name, step=self.steps, loss=loss)

    def new_epoch(self) -> None:
        """An epoch has ended: the dynamic significance threshold follows the learning rate and the updates."""
        if self._end is not None:
            self._end.new_epoch(self._rate)

    # -- the end ----------------------------------------------------------------------------

    def leave(self) -> None:
        """Training is over here: what is pending goes out, and the model becomes the base."""
        if self._left:
            return
        self._crew.close()
        if self._end is not None and self._wan is not None:
            if not self._end.finished:  # it is, when a site that had left is started again
                self._wan.send(self._end.finish(self._wan.now))
            self._wan.until_free()
            if self._keeper is not None:
                self._keeper.write_own(self.steps)
                self._keeper.beside.wait()
            self._wan.send([Leave(self.name)])
            self._weights.copy_(self._end.base.vector)
            if self.ledger is not None:
                self._write_end()
            self._wan.close()
        elif self._keeper is not None:
            self._keeper.beside.wait()
        self._left = True
        self._spread(True)
        self._average_buffers()
        self._bridge.write_weights(self._weights)

    def _write_end(self) -> None:
        assert self.ledger is not None
        assert self._wan is not None
        self.ledger.write(
            "site",
            self._wan.now,
            site=self.name,
            steps=self.steps,
            waiting_seconds=self._wan.waited,
            up_bytes=self._wan.up_bytes,
            down_bytes=self._wan.down_bytes,
            lan_bytes=self.lan.sent_bytes,
            encoded_ahead=self._crew.ahead.share if self._crew.ahead is not None else 0.0,
            socket_bytes=self._wan.socket_bytes(),
        )
        self.ledger.close()

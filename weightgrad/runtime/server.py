"""The global server in the field: the state machine of `wan/`, fed by gRPC, kept on disk, watched.

One thread owns the state machine. A round's answer leaves only after the state that made it is on disk, so a
server that is killed at any moment comes back knowing everything that any site has been told.
"""

from __future__ import annotations

import logging
import queue
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from weightgrad.errors import ProtocolError, SavedStateError, StrategyError, WeightGradError
from weightgrad.kernels.noise import derive
from weightgrad.ledger import Ledger
from weightgrad.runtime import codec_speed, saved
from weightgrad.runtime.admission import row_difference
from weightgrad.runtime.credentials import Credentials, Revoked
from weightgrad.runtime.diary import Diary
from weightgrad.runtime.disk_log import DiskLog
from weightgrad.runtime.door import Door, House
from weightgrad.runtime.lanes_server import LaneLimits, LanesServer
from weightgrad.runtime.metrics import Metrics
from weightgrad.runtime.tls_check import is_loopback
from weightgrad.site.described import Described
from weightgrad.site.layout import Layout
from weightgrad.wan.base import Base
from weightgrad.wan.global_server import Closed, GlobalServer, Outbox
from weightgrad.wan.guard import Guard
from weightgrad.wan.message_bytes import MessageLimits, pack, unpack
from weightgrad.wan.messages import Answer, Join, Leave, Message, Plant, Push

log = logging.getLogger("weightgrad.serve")

_NAME = "server"
_GOODBYE_S = 60.0  # to wait for sites that have finished and did not say goodbye
_HANG_UP_S = 5.0  # for those that did
_LOOK_S = 0.2


@dataclass(frozen=True)
class ServeOptions:
    """How a server runs, beside what it trains."""

    listen: str = "0.0.0.0:7443"
    state: Path | None = None
    out: Path | None = None  # where the final base goes
    until_finished: bool = False
    guard: Guard | None = None
    max_message: int = 1 << 30  # bytes that a site may send at once


class FieldServer:
    """One run's global server."""

    def __init__(
        self,
        house: House,
        options: ServeOptions,
        credentials: Credentials | None,
        ledger: Ledger | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        if credentials is None and not is_loopback(options.listen):
            raise StrategyError(f"without certificates a server is for this machine only; not on {options.listen}")
        self.house, self._options = house, options
        self._guard = options.guard or Guard(factor=1e9)  # what is not finite is refused in any case
        self.metrics = metrics or Metrics()
        self.diary = Diary(ledger, self.metrics)
        revoked = Revoked(credentials.directory / "revoked.txt") if credentials is not None else None
        self.door = Door(house, secure=credentials is not None, revoked=revoked, refused=self.diary.refused_connection)
        if credentials is not None:
            self.metrics.certificate(credentials.expires)
        self.core: GlobalServer | None = None
        self._inbox: queue.Queue[tuple[str, bytes | memoryview]] = queue.Queue(
            maxsize=256
        )  # full: sites are made to wait
        self._early: dict[str, Join] = {}  # came before there was a base
        self._number = 0  # of the checkpoint
        self.failed: BaseException | None = None
        self._stopping = False
        self._over: float | None = None  # since when all have finished
        self._told = 0  # the last round of which was said who is behind
        self.door.version = lambda: self.core.base.version if self.core is not None else None
        self._restore()
        self.lanes = LanesServer(
            options.listen,
            credentials=credentials.for_server() if credentials is not None else None,
            enter=self.door.enter,
            on_message=lambda site, data: self._inbox.put((site, data)),
            on_lost=self._lost,
            peer_check=self.door.check,
            on_refused=self.diary.refused_connection,
            limits=LaneLimits(max_message=options.max_message, max_buffered=options.max_message + (64 << 20)),
        )

    @property
    def now(self) -> float:
        """Seconds since it was started."""
        return self.diary.now

    # -- the run ----------------------------------------------------------------------------

    def run(self) -> None:
        """Until stopped, or until every site has finished when that was asked for."""
        self.lanes.start()
        log.info("listening on %s for %s", self._options.listen, ", ".join(self.house.sites))
        try:
            while self._goes_on() and self._turn():
                pass
        except BaseException as error:
            self.failed = error
            raise
        finally:
            self.lanes.stop(2.0)
            self._write_end()

    def _goes_on(self) -> bool:
        """Whether it is not over. When it is, sites that have not heard so may still ask, and then hang up.

        One that died with its last push, or this server before it could answer, would else meet a closed door.
        """
        if self.core is None or not (self._options.until_finished and self._finished()):
            self._over = None
            return True
        under_way = any(one.lanes and one.unacknowledged_bytes for one in self.lanes.sessions().values())
        self._over = time.monotonic() if self._over is None or under_way else self._over  # a base may take minutes
        patience = _GOODBYE_S if any(m.live for m in self.core.members.by_name.values()) else _HANG_UP_S
        waits = patience == _GOODBYE_S or bool(self.lanes.sessions())
        return waits and time.monotonic() < self._over + patience

    def stop(self) -> None:
        """From any thread: `run` returns soon."""
        self._stopping = True  # and no more: this may be a signal that came in the middle of anything

    def _turn(self) -> bool:
        if self._stopping:
            return False
        wake = self.core.next_wake() if self.core is not None else None
        patience = _LOOK_S if wake is None else min(_LOOK_S, max(0.0, wake - self.now))
        try:
            site, data = self._inbox.get(timeout=patience)
        except queue.Empty:
            self._say_who_is_behind()
            if self.core is not None and wake is not None and self.now >= wake:
                self._act(self.core.wake(self.now))
            return True
        self._take(site, data)
        return True

    def _say_who_is_behind(self) -> None:
        """Once a round: when it has been open for long, compared with the rounds before."""
        if self.core is None or (late := self.core.overdue(self.now)) is None or late[0] == self._told:
            return
        self._told, missing = late
        log.warning("round %d waits for %s", self._told, ", ".join(missing))

    def _take(self, site: str, data: bytes | memoryview) -> None:
        try:
            message = unpack(data, self._limits())
            self._check_sender(site, message)
            self._handle(site, message)
        except SavedStateError:
            raise
        except WeightGradError as error:
            self.diary.refused_update(site, f"{type(error).__name__}: {error}")
            self.lanes.drop(site, str(error))  # or it would wait for an answer for ever

    def _handle(self, site: str, message: Message) -> None:
        if isinstance(message, Plant):
            self._plant(message)
        elif self.core is not None:
            self._receive(self.core, message)
        elif isinstance(message, Join):
            self._early[site] = message
        else:
            raise ProtocolError(f"{site} sent a {type(message).__name__} before there was a base")

    def _receive(self, core: GlobalServer, message: Message) -> None:
        if isinstance(message, Push):
            self._check_push(core, message)
            self.diary.pushed(message, core.base.version)
        elif isinstance(message, Join):
            self.diary.joined(message)
        elif isinstance(message, Leave):
            log.info("%s leaves", message.site)
        self._act(core.receive(message, self.now))
        if isinstance(message, Leave):
            self._save(core)  # or a server that is started again would wait for its goodbye

    def _check_sender(self, site: str, message: Message) -> None:
        named = getattr(message, "site", None)
        if named != site:
            raise ProtocolError(f"{site} sent a {type(message).__name__} in the name of {named!r}")

    def _check_push(self, core: GlobalServer, push: Push) -> None:
        if push.seen > core.base.version:
            raise ProtocolError(f"{push.site} pushes on base version {push.seen}, the server has {core.base.version}")
        if core.base.takes_gradients and push.parts and push.rate is None:
            raise ProtocolError(f"{push.site} sent gradients without the learning rate to step with")

    def _limits(self) -> MessageLimits:
        numel = self.door.layout.numel if self.door.layout is not None else 2**32
        return MessageLimits(max_bytes=64 * 2**20 + 40 * numel, max_elements=numel)

    def _act(self, out: Outbox) -> None:
        assert self.core is not None
        for site, why in out.refused:
            self.diary.refused_update(site, why)
        for name in out.held_back:
            log.warning("%s is behind: the others wait for it", name)
        for name in out.lost:
            self.diary.lost(name)
        if out.closed:
            self._save(self.core, out.closed)
        for closed in out.closed:
            self.diary.closed(closed)
        for name, message in out.messages:
            data = pack(message)
            if isinstance(message, Answer):
                self.metrics.down_bytes_total.labels(site=name).inc(len(data))
            self.lanes.send(name, data)
        waits = self.core.waits_for()
        self.metrics.wait_for(waits)

    # -- the first base, and disk -----------------------------------------------------------

    def _plant(self, message: Plant) -> None:
        if self.core is not None or message.site != self.door.planter or self.door.layout is None:
            return
        weights = message.snapshot.get("base", torch.empty(0))
        if self._options.state is not None:
            shutil.rmtree(self._options.state / "answers", ignore_errors=True)  # of another run
        core = self._make(self.door.layout, self.door.optimizer)
        if weights.shape != core.base.vector.shape:
            raise ProtocolError(f"{message.site} planted {weights.numel()} weights of another model")
        core.base.vector.copy_(weights)
        if core.base.digest() != self.door.digest:
            raise ProtocolError(f"the weights that {message.site} planted are not those it announced")
        self.door.planted = True
        for name in self.house.sites:
            core.members.join(name)
        self._save(core)
        self.core = core
        log.info("%s planted the first base: %s parameters", message.site, f"{weights.numel():,}")
        early, self._early = self._early, {}
        for one in early.values():
            self._take(one.site, pack(one))

    def _make(self, layout: Layout, optimizer: dict[str, Any] | None) -> GlobalServer:
        strategy = self.door.strategy = self.house.fit(layout.numel)
        source = Described.parse(optimizer) if strategy.shares == "gradients" and optimizer is not None else None
        base = Base(layout, torch.zeros(layout.numel), optimizer=source, rate=_untold)
        key = derive(self.house.seed, 20)
        state = self._options.state
        kept = DiskLog(state / "answers", max(2**26, 64 * layout.numel)) if state is not None else None
        core = GlobalServer(base, strategy.for_server(), key, guard=self._guard, log=kept)
        if core.planner is not None:
            core.planner.codec_bytes_s = codec_speed.bytes_a_second(strategy.wan_codec("up"))
        return core

    def _save(self, core: GlobalServer, closed: Sequence[Closed] = ()) -> None:
        if self._options.state is None:
            return
        began = time.monotonic()
        self._number += 1
        facts = {
            "layout": [[slot.name, list(slot.shape)] for slot in core.base.layout.slots],
            **self._kind_of_run(core.base.layout),
            "digest": self.door.digest,
            "optimizer": self.door.optimizer,
            "rounds": [one.words() for one in closed],
        }
        saved.write(self._options.state, _NAME, self._number, core.checkpoint(), facts)
        self.metrics.checkpointed(time.monotonic() - began)

    def _restore(self) -> None:
        if self._options.state is None or (found := saved.newest(self._options.state, _NAME)) is None:
            return
        for line in found.damaged:
            log.error("%s; going on with the checkpoint before it", line)
        self.door.layout = Layout.of_shapes((name, tuple(shape)) for name, shape in found.facts["layout"])
        for name, value in self._kind_of_run(self.door.layout).items():
            if (then := found.facts[name]) != value:
                what = f"{name} is {then}, here it is {value}"
                if name == "row":
                    what = f"strategy is another, {row_difference(value, then) or 'the overlap'}"
                raise SavedStateError(
                    f"{self._options.state} is of another run: its {what}; "
                    "give --state another directory, or the recipe of that run"
                )
        self.door.digest, self.door.optimizer = found.facts["digest"], found.facts["optimizer"]
        self.door.planted = True
        self.core = self._make(self.door.layout, self.door.optimizer)
        self._number = found.number
        self.core.restore(found.tensors)  # its sites come by themselves: their sessions are gone
        log.info("goes on with base version %d, step %d", self.core.base.version, self.core.base.step)
        self.diary.unsaid(found.facts.get("rounds", []))

    def _kind_of_run(self, layout: Layout) -> dict[str, Any]:
        row = self.house.fit(layout.numel).row()
        return {"row": row, "seed": self.house.seed, "sites": list(self.house.sites)}

    # -- what is said -----------------------------------------------------------------------

    def _lost(self, site: str) -> None:
        log.warning("%s: its line is gone", site)
        self.metrics.site_up.labels(site=site).set(0)
        self.door.gone(site)

    def _finished(self) -> bool:
        core = self.core
        if core is None:
            return False
        members = core.members.by_name.values()
        return bool(members) and all(m.done or not m.live for m in members) and any(m.done for m in members)

    def status(self) -> dict[str, object]:
        """For /healthz."""
        core = self.core
        return {
            "healthy": self.failed is None,
            "version": core.base.version if core is not None else None,
            "step": core.base.step if core is not None else None,
            "waiting_for": core.waits_for() if core is not None else list(self.house.sites),
            "connected": sorted(site for site, one in self.lanes.sessions().items() if one.lanes),
        }

    def _write_end(self) -> None:
        try:
            self._write_base()
        except (OSError, SafetensorError) as error:
            words = saved.cannot_write(Path("base.safetensors"), error)
            if self.failed is None:
                raise words from error
            log.error("%s", words)  # and the first failure is the one that is raised

    def _write_base(self) -> None:
        if self.core is not None and self._options.out is not None:
            layout, vector = self.core.base.layout, self.core.base.vector
            tensors = {slot.name: slot.of(vector).clone() for slot in layout.slots}
            save_file(tensors, str(self._options.out / "base.safetensors"))
        self.diary.write("end", status="finished" if self._finished() else "interrupted")


def _untold(step: int) -> float:
    raise WeightGradError(f"no push said the learning rate of step {step}; sites must send it with shared gradients")

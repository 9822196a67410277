"""What every process of the global server has: its elements, its disk, and its connections to the ranks.

Process 0 is also the coordinator (`runtime/server/global_server.py`); the others obey it (`runtime/server/worker.py`).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from weightgrad.core import pieces
from weightgrad.core.global_model import WEIGHTS, GlobalModel
from weightgrad.core.layout import Layout
from weightgrad.core.optimizers.spec import AT_SITES, OptimizerSpec
from weightgrad.core.random_streams import RunStream
from weightgrad.core.server.result_log import MemoryResultLog
from weightgrad.core.server.shard import ServerShard
from weightgrad.core.strategies import Strategy
from weightgrad.core.vector_checks import with_prefix, without_prefix
from weightgrad.errors import ProtocolError, WeightGradError
from weightgrad.kernels import fixed
from weightgrad.kernels.moments import moments
from weightgrad.kernels.noise import derive
from weightgrad.runtime.checkpoints.snapshot import Snapshot
from weightgrad.runtime.freed_memory import FreedMemory
from weightgrad.runtime.rate_limiter import RateLimiter
from weightgrad.runtime.server.orders import Begin, Complete, Initialized, Note
from weightgrad.runtime.server.shard_server import ShardServer, most_spans
from weightgrad.runtime.server.storage import Input, ServerStorage
from weightgrad.runtime.transport.transport import Peer, ServerTransport
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_bytes import MessageLimits, to_buffers, unpack
from weightgrad.wire.message_sizes import nbytes
from weightgrad.wire.messages import Bulk, Holding, ModelPart, PushPart

StrategyFor = Callable[[int, Mapping[str, Any] | None], Strategy]
"""The strategy of a model of so many parameters, with what is known of the optimizer."""

log = logging.getLogger("weightgrad.serve")

LEAST_RESULT_BYTES = 16 << 20
"""Of results that are kept for sites that were away, at least."""
_ALL_RESULTS = 16  # times as much is kept of results where they are all that a late site can be given
_RESULT_BYTES_A_PARAMETER = 2
MOST_MESSAGE_BYTES = 256 << 20
_PUSHES_SENT = 2  # times as many as may wait: a rank that connects again sends its push again

Sent = Callable[[str, int], None]
"""Counts a message to a site."""


@dataclass
class _FirstModel:
    """The first weights, while they come."""

    begin: Begin
    shard: ServerShard
    arrived: Intervals = field(
        default_factory=lambda: Intervals(())
    )  # a rank that connects again sends its weights again


class ServerProcess:
    """One process of the global server.

    Args:
        number: which of the processes.
        strategy_for: the strategy for a model of so many parameters and an optimizer.
        seed: the seed of the run.
        transport: the connections to the ranks.
        state: directory of this process's state; None keeps nothing.
        on_sent: counts messages to sites.
        observe: called with the seconds that writing a snapshot took.
        result_bytes: how many bytes of results are kept for sites that were away; None: as many as half a model has.
    """

    def __init__(
        self,
        number: int,
        strategy_for: StrategyFor,
        seed: int,
        transport: ServerTransport,
        state: Path | None,
        on_sent: Sent,
        observe: Callable[[float], None],
        result_bytes: int | None = None,
    ) -> None:
        self._result_bytes = result_bytes
        self.number = number
        self.transport = transport
        self.storage = ServerStorage(state, observe) if state is not None else None
        self.serving: ShardServer | None = None
        """The elements and their ranks; None before there is a model."""
        self.begin: Begin | None = None
        self.replaying = False
        """Whether inputs are read from the log: nothing is written or sent."""
        self._strategy_for, self._seed, self._on_sent = strategy_for, seed, on_sent
        self._first: _FirstModel | None = None
        self._early: dict[Peer, tuple[bytes, int]] = {}  # what ranks hold, and in how many intervals
        self._positions: dict[tuple[str, int], int] = {}  # where the log has the first part of an open push
        self._freed_memory = FreedMemory()
        self._open: dict[tuple[str, int], int] = {}  # of the snapshot: open pushes, and at which version they began
        self._snapshot_end = 0  # the last input before the snapshot
        self._holdings = RateLimiter(per_s=1.0, burst=32)
        self._pushed = RateLimiter(per_s=0.1, burst=1)  # whole pushes of a site, since a round closed

    # -- messages ------------------------------------------------------------------------------

    def send(self, peer: Peer, message: Bulk) -> None:
        """Queue a bulk message for a rank."""
        if not self.replaying and self.transport.send(peer, to_buffers(message)):
            self._on_sent(peer.site, nbytes(message))

    def record(self, kind: Input, now: float, *buffers: bytes | memoryview) -> int:
        """Append an input to the log, unless it came from there."""
        if self.storage is None or self.replaying:
            return 0
        return self.storage.append(kind, now, *buffers)

    def needed_from(self, push: tuple[str, int], position: int) -> None:
        """Remember where in the log an open push begins."""
        self._positions.setdefault(push, position)

    def is_over(self, push: tuple[str, int], position: int | None) -> bool:
        """Whether an input of the log is of a push that was not open any more when the snapshot was made.

        The log begins with the first input of the oldest push that was open. What others were dropped or given up until
        then must not be taken now.
        """
        return position is not None and self.in_snapshot(position) and push not in self._open

    def in_snapshot(self, position: int) -> bool:
        """Whether an input of the log came before the snapshot, which has everything but open pushes."""
        return 0 < position <= self._snapshot_end

    def began(self, push: tuple[str, int], version: int) -> int:
        """The version at which a push began; the snapshot knows it of those that were open."""
        return self._open.get(push, version) if self.replaying else version

    def needed_anew(self, push: tuple[str, int], position: int) -> None:
        """What is known of an open push is in the log once more: what came before is not needed for it."""
        self._positions[push] = position

    def sync(self) -> None:
        """Make everything that came durable, before anybody is told what followed from it."""
        if self.storage is not None and not self.replaying:
            self.storage.sync()

    def limits(self) -> MessageLimits:
        """What is accepted from a rank."""
        numel = self.serving.shard.layout.numel if self.serving is not None else None
        if numel is None and self._first is not None:
            numel = self._first.shard.layout.numel
        return MessageLimits(max_bytes=MOST_MESSAGE_BYTES, max_elements=numel or 2**40)

    def handle(self, peer: Peer, data: bytes | memoryview, now: float, position: int | None = None) -> list[Note]:
        """Take a bulk message.

        Args:
            peer: who sent it.
            data: the message.
            now: the time.
            position: where it is in the log, if it comes from there.

        Returns:
            What the coordinator must know.

        Raises:
            WeightGradError: the message is wrong; the peer is to be shown why.
        """
        message = unpack(data, self.limits())
        if isinstance(message, ModelPart):
            return self._first_part(peer, message)
        if not isinstance(message, Holding | PushPart):
            raise ProtocolError(f"{peer} sent a {type(message).__name__} on the bulk lane")
        if (message.site, message.rank) != peer:
            named = Peer(message.site, message.rank)
            raise ProtocolError(f"{peer} sent a {type(message).__name__} in the name of {named}")
        if self.serving is None and isinstance(message, Holding):
            self._hold_early(peer, message, data)
            return []
        if self.serving is None:
            raise ProtocolError(f"{peer} sent a {type(message).__name__} before there was a global model")
        if isinstance(message, PushPart):
            if self.is_over((message.site, message.round), position):
                return []
            if position is None:  # what is in the log was let through
                self.serving.check_part(message, len(data))
            if position is None and not self._pushed.try_take(peer.site, len(data) / self.serving.most_push_bytes):
                raise ProtocolError(f"{peer} sends its pushes again and again, and no round has closed meanwhile")
        else:
            self.serving.check_holding(message)
            few = 4096 + self.serving.shard.layout.numel // 1024  # intervals: as much work as is seldom enough
            if position is None and not self._holdings.try_take(peer, 1 + len(message.held.spans) / few):
                raise ProtocolError(f"{peer} says what it holds more often than once a second")
        position = self.record(Input.BULK, now, data) if position is None else position
        if isinstance(message, Holding):
            self.serving.hold(message)
            return []
        self.needed_from((message.site, message.round), position)
        version = self.began((message.site, message.round), self.serving.shard.global_model.version)
        complete = self.serving.push_part(message, len(data), version)
        return [] if complete is None else [Complete(process=self.number, push=complete)]

    # -- the first model -----------------------------------------------------------------------

    def _hold_early(self, peer: Peer, message: Holding, data: bytes | memoryview) -> None:
        """Keep what a rank holds until there is a model."""
        numel = 0 if self._first is None else self._first.shard.layout.numel
        spans = {other: count for other, (_, count) in self._early.items() if other.site == peer.site}
        spans[peer] = len(message.held.spans)
        if sum(spans.values()) > most_spans(numel):
            raise ProtocolError(
                f"the ranks of {peer.site} hold {sum(spans.values())} intervals; wanted at most {most_spans(numel)}: "
                "shard the model into longer stretches"
            )
        self._early[peer] = bytes(data), spans[peer]

    def prepare(self, begin: Begin) -> None:
        """Expect the first weights of a model."""
        self.serving = None
        self._first = _FirstModel(begin, self._make_shard(begin))

    def _first_part(self, peer: Peer, part: ModelPart) -> list[Note]:
        first = self._first
        if first is None or peer.site != first.begin.sender:
            return []  # another site has sent them, or this one did before it was interrupted
        if part.vector != WEIGHTS:
            raise ProtocolError(
                f"{peer} sent the vector {part.vector!r} for the first global model, wanted {WEIGHTS!r}"
            )
        for segment in part.segments:
            segment.into(first.shard.global_model.vector, fixed.STORE, first.shard.served)
            first.arrived = first.arrived | (segment.intervals & first.shard.served)
        if first.arrived.numel < first.shard.served.numel:
            return []
        model = first.shard.global_model
        squares = moments(model.vector).squares
        if not math.isfinite(squares):
            raise ProtocolError(f"{peer} sent a first global model that is not finite; the next site may send its own")
        return [Initialized(process=self.number, digest=model.digest_value(), squares=squares)]

    @property
    def expects_model(self) -> bool:
        """Whether the first weights of a model are to come."""
        return self._first is not None

    def start_serving(self) -> None:
        """The first weights are here, from all ranks: they are the global model."""
        assert self._first is not None
        first, self._first = self._first, None
        self.begin = first.begin
        self.serving = self._serve(first.shard)
        if self.storage is not None:
            self.storage.restart()

    def take_early(self) -> list[tuple[Peer, bytes]]:
        """What ranks said before there was a model: the caller handles it after the first snapshot, as if it came."""
        early, self._early = self._early, {}
        return [(peer, data) for peer, (data, _) in early.items()]

    def _make_shard(self, begin: Begin) -> ServerShard:
        layout = Layout.of_shapes((name, tuple(shape)) for name, shape in begin.layout)
        served = Intervals.of((start, stop) for start, stop in begin.served)
        strategy = self._strategy_for(layout.numel, begin.optimizer)
        gradients = strategy.shares == "gradients" and begin.optimizer is not None
        told = (begin.optimizer or {}) if gradients else {}
        elsewhere = bool(told.get(AT_SITES))
        source = OptimizerSpec.parse(told) if told and not elsewhere else None
        model = GlobalModel(
            layout,
            torch.zeros(served.numel, dtype=torch.float32),
            optimizer=source,
            rate=_no_learning_rate,
            held=served,
            elsewhere=elsewhere,
        )
        usual = max(LEAST_RESULT_BYTES, _RESULT_BYTES_A_PARAMETER * served.numel) * (_ALL_RESULTS if elsewhere else 1)
        kept = usual if self._result_bytes is None else self._result_bytes
        results = MemoryResultLog(kept)
        key = derive(self._seed, RunStream.GLOBAL_SERVER)
        shard = ServerShard(model, strategy.for_server().for_shard, key, results, process=self.number)
        self._limit_transport(shard, kept)
        return shard

    def _serve(self, shard: ServerShard) -> ShardServer:
        found = ShardServer(shard, self.send, self._waiting_bytes)
        self._pushed = RateLimiter(per_s=0.1, burst=_PUSHES_SENT * found.most_pushes)
        return found

    def _limit_transport(self, shard: ServerShard, result_bytes: int) -> None:
        """Let a rank send no longer messages than this model has, and keep only so much for one that does not read."""
        numel = shard.layout.numel
        largest = max((slot.numel for slot in shard.layout.slots), default=0) if shard.plan.per_tensor else pieces.PIECE
        beside = min(8 << 20, 8 * numel + (2 << 20))  # the rest of a part, or what a rank holds
        self.transport.max_message = min(MOST_MESSAGE_BYTES, 8 * min(largest, numel) + beside)
        vectors = len(shard.global_model.vectors())
        self.transport.max_queued = (64 << 20) + 8 * vectors * shard.served.numel + result_bytes

    def _waiting_bytes(self, peer: Peer) -> int | None:
        status = self.transport.sessions().get(peer)
        return None if status is None else status.unacknowledged_bytes

    # -- snapshots -----------------------------------------------------------------------------

    def snapshot(
        self,
        more: dict[str, torch.Tensor],
        facts: dict[str, Any],
        *,
        wait: bool,
        keep: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        """Write a snapshot.

        Args:
            more: tensors of the caller's own.
            facts: what else belongs to it.
            wait: whether to return only when it is on the disk.
            keep: (site, round) of pushes of which the caller needs what is in the log, and when they began.
        """
        if self.storage is None or self.serving is None or self.begin is None:
            return
        holdings = {
            site: [epoch, {rank: list(held.spans) for rank, held in ranks.items()}]
            for site, (epoch, ranks) in self.serving.holdings().items()
        }
        # Also of a site whose ranks have been started anew and have not all come: results are still cut for it.
        cut_for = {name: [list(own.spans) for own in ranks] for name, ranks in self.serving.shard.holdings.items()}
        version = self.serving.shard.global_model.version
        open_pushes = {**dict.fromkeys(self.serving.shard.pushes, version), **(keep or {}), **self.serving.incomplete}
        self._positions = {key: at for key, at in self._positions.items() if key in open_pushes}
        position = min(self._positions.values(), default=self.storage.last + 1) - 1
        own = {
            "begin": dict(vars(self.begin)),
            "holdings": holdings,
            "unready": self.serving.unready(),
            "cut_for": cut_for,
            "open": [[site, round_, began] for (site, round_), began in sorted(open_pushes.items())],
        }
        tensors = {**with_prefix("shard.", self.serving.shard.state()), **with_prefix("process.", more)}
        self.storage.write(tensors, {**facts, **own}, position, wait=wait)

    def restore(self, found: Snapshot) -> dict[str, torch.Tensor]:
        """Become what a snapshot says; the caller's own tensors are returned."""
        self.begin = Begin(**found.facts["begin"])
        shard = self._make_shard(self.begin)
        shard.load(without_prefix("shard.", found.tensors))
        for name, ranks in found.facts.get("cut_for", {}).items():
            shard.set_holdings(name, [_intervals(spans) for spans in ranks])
        self._open = {(site, round_): began for site, round_, began in found.facts.get("open", ())}
        self._snapshot_end = int(found.facts["end"])
        self.serving = self._serve(shard)
        self.serving.restore_unready(found.facts.get("unready", {}))
        self.serving.restore_holdings(
            {
                site: (epoch, {int(rank): _intervals(spans) for rank, spans in ranks.items()})
                for site, (epoch, ranks) in found.facts["holdings"].items()
            }
        )
        return without_prefix("process.", found.tensors)

    def round_closed(self, closed: set[tuple[str, int]]) -> None:
        """The pushes of a round are in the global model: the log is not needed for them any more."""
        for key in closed:
            self._positions.pop(key, None)
        self._pushed.forget()
        self._freed_memory.round_closed()

    def before_close(self) -> None:
        """Wait until nothing that a snapshot still writes will change."""
        if self.storage is not None:
            self.storage.settle()

    def close(self) -> None:
        """Let another process use the directory."""
        if self.storage is not None:
            self.storage.close()


def _intervals(spans: list[tuple[int, int]]) -> Intervals:
    return Intervals.of((start, stop) for start, stop in spans)


def facts_text(facts: dict[str, Any]) -> str:
    """Facts as they look after their way through JSON, to compare them with those of a snapshot."""
    return json.dumps(facts, sort_keys=True)


def _no_learning_rate(step: int) -> float:
    raise WeightGradError(f"no push had the learning rate of step {step}; sites must send it with shared gradients")

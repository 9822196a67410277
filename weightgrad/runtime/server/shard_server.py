"""One process of the global server and the ranks it hears from: parts in, parts out, for the elements it serves.

A rank says first which elements it holds (`Holding`). Its pushes come in parts; when every rank of a site has sent its
last part, the push is complete here. When a round closes, every rank is sent what it holds of the result. A site that
joins gets the results it has missed, or the global model: as many parts at a time as its link takes, so that a download
costs the server no second copy of the model. Rounds that close meanwhile are sent in between, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from weightgrad.codecs import Codec
from weightgrad.core import pieces
from weightgrad.core.server.close_order import ClosedPart, CloseOrder
from weightgrad.core.server.push_facts import PushFacts
from weightgrad.core.server.shard import ServerShard, values_bytes
from weightgrad.errors import ProtocolError
from weightgrad.runtime.transport.transport import Peer
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_parts import result_parts
from weightgrad.wire.messages import Bulk, Holding, ModelPart, PushPart, RoundResult

_AHEAD_BYTES = 16 << 20  # of a download that may wait for a rank's link

_PART_COST = 2048  # of a part in memory, beside its bytes
_SEGMENT_COST = 1024
_SPANS = 1 << 16  # intervals that the ranks of a site may hold here, and one more for each
_SPAN = 32  # elements: shards of columns have many short ones

Send = Callable[[Peer, Bulk], None]
"""Queues a message for a rank."""


@dataclass(frozen=True, kw_only=True)
class Provision:
    """What a site that joins is to be sent, once it is known what its ranks hold.

    Attributes:
        site: the site.
        epoch: of the site's processes; None: whichever are there.
        since: the version after which results are sent; None sends none.
        whole: whether the whole model is sent, before any results.
        codec: the codec of a download; None: exact.
    """

    site: str
    epoch: int | None
    since: int | None
    whole: bool = False
    codec: Codec | None = None


@dataclass
class _Site:
    """The ranks of a site, as this process knows them."""

    epoch: int = -1
    ranks: int = 0
    held: dict[int, Intervals] = field(default_factory=dict)
    parts: dict[int, dict[int, list[PushPart]]] = field(default_factory=dict)  # by round and rank; not complete yet
    costs: dict[int, dict[int, int]] = field(default_factory=dict)  # of these, in bytes of memory
    begun: dict[int, int] = field(default_factory=dict)  # by round: the version at which its first part came
    owed: Provision | None = None  # to be sent when all ranks have said what they hold
    missed: list[RoundResult] | None = None  # with it: the results that the site needs; None: the whole model
    then: tuple[int, Mapping[str, Tensor]] | None = None  # with it: the model that the results follow on

    @property
    def ready(self) -> bool:
        """Whether every rank that holds something served here has said so."""
        return 0 < self.ranks == len(self.held)

    def forget(self, round_: int) -> None:
        """Forget the parts of a push."""
        for found in (self.parts, self.costs, self.begun):
            found.pop(round_, None)


@dataclass(frozen=True, kw_only=True)
class CompletePush:
    """All parts of a push are here.

    Attributes:
        site: the site.
        round: the round of the push.
        facts: what was found in its values.
        size: the bytes of its values, as `values_bytes` counts them.
    """

    site: str
    round: int
    facts: PushFacts
    size: int


class ShardServer:
    """What one process of the global server does for its elements.

    Args:
        shard: the elements.
        send: queues a message for a rank.
        waiting_bytes: how many bytes are still on their way to a rank; None if it is not connected.
    """

    def __init__(self, shard: ServerShard, send: Send, waiting_bytes: Callable[[Peer], int | None]) -> None:
        self.shard = shard
        self._send, self._waiting_bytes = send, waiting_bytes
        self._sites: dict[str, _Site] = {}
        self._downloads: dict[Peer, Iterator[ModelPart]] = {}
        self._costs: dict[tuple[str, int], int] = {}  # of complete pushes, in bytes of memory
        self.most_pushes = shard.plan.most_waiting
        """Pushes of a site, complete or not, that are kept until their rounds close."""
        tensors = len(shard.layout.slots) + shard.served.numel // pieces.PIECE
        self.most_push_bytes = 8 * shard.served.numel + 2 * (_PART_COST + _SEGMENT_COST) * (tensors + 64)
        """Memory of one push: twice what its elements have as float32, and what its parts cost beside."""

    def check_holding(self, message: Holding) -> None:
        """Refuse a holding of very many intervals, before it is written to the log.

        Results are cut where no two ranks of a site must share a piece, and name these intervals to all sites.

        Raises:
            ProtocolError: the ranks of the site have more intervals than any way to shard a model makes.
        """
        site = self._sites.get(message.site)
        held = {} if site is None or site.epoch != message.epoch else site.held
        others = sum(len(own.spans) for rank, own in held.items() if rank != message.rank)
        if others + len(message.held.spans) > most_spans(self.shard.layout.numel):
            raise ProtocolError(
                f"the ranks of {message.site} hold {others + len(message.held.spans)} intervals; wanted at most "
                f"{most_spans(self.shard.layout.numel)}: shard the model into longer stretches"
            )

    @property
    def most_bytes(self) -> int:
        """Memory for the pushes of one site whose rounds have not closed."""
        return self.most_pushes * self.most_push_bytes

    # -- messages in ---------------------------------------------------------------------------

    def hold(self, message: Holding) -> None:
        """A rank says which elements it holds.

        Raises:
            ProtocolError: the ranks of the site contradict each other.
        """
        site = self._sites.setdefault(message.site, _Site())
        if message.epoch != site.epoch:  # the processes of the site were started anew: what they had sent comes again
            site.epoch, site.ranks, site.held = message.epoch, message.ranks, {}
            site.parts, site.costs, site.begun = {}, {}, {}
        if message.ranks != site.ranks:
            raise ProtocolError(
                f"rank {message.rank} of {message.site} says that {message.ranks} ranks hold something of this "
                f"process, another rank said {site.ranks}"
            )
        for round_, by_rank in list(site.parts.items()):  # what the rank has not sent completely, it sends again
            if message.rank in by_rank and not by_rank[message.rank][-1].last:
                del by_rank[message.rank], site.costs[round_][message.rank]
                if not by_rank:
                    site.forget(round_)
        served = self.shard.served
        others = Intervals.of(span for rank, held in site.held.items() if rank != message.rank for span in held.spans)
        if (others & message.held).numel:
            raise ProtocolError(f"rank {message.rank} of {message.site} holds elements that another rank holds")
        site.held[message.rank] = message.held
        if site.ready:
            if not (others | message.held).contains(served):
                raise ProtocolError(f"no rank of {message.site} holds some of the elements that are served here")
            self.shard.set_holdings(message.site, [site.held[rank] for rank in sorted(site.held)])
            self._pay(message.site)

    def check_part(self, part: PushPart, size: int) -> None:
        """Refuse a part of a push for which there is no room, before it is written to the log.

        Args:
            part: the part.
            size: its bytes.

        Raises:
            ProtocolError: the site has too many pushes whose rounds have not closed, or they are too large.
        """
        site = self._holder(part)
        rounds = {round_ for name, round_ in self._costs if name == part.site} | set(site.parts)
        if part.round not in rounds and len(rounds) >= self.most_pushes:
            raise ProtocolError(
                f"{part.site} pushes for round {part.round}, and {len(rounds)} of its pushes wait for their rounds to "
                f"close; at most {self.most_pushes} may"
            )
        held = sum(cost for (name, _), cost in self._costs.items() if name == part.site)
        held += sum(cost for by_rank in site.costs.values() for cost in by_rank.values())
        if held + _cost(part, size) > self.most_bytes:
            raise ProtocolError(
                f"{part.site} pushes {size} bytes for round {part.round}, and {held} wait for their rounds to close; "
                f"there is room for {self.most_bytes}"
            )

    def _holder(self, part: PushPart) -> _Site:
        site = self._sites.get(part.site)
        if site is None or part.rank not in site.held:
            raise ProtocolError(f"rank {part.rank} of {part.site} pushes before it has said what it holds")
        return site

    def push_part(self, part: PushPart, size: int = 0, began: int | None = None) -> CompletePush | None:
        """Take a part of a push.

        Args:
            part: the part, which `check_part` has let through.
            size: its bytes.
            began: the version of the global model at which the push began; None: the present one.

        Returns:
            The push, if it is complete with this part.

        Raises:
            ProtocolError: the rank has not said what it holds.
        """
        site = self._holder(part)
        by_rank, costs = site.parts.setdefault(part.round, {}), site.costs.setdefault(part.round, {})
        site.begun.setdefault(part.round, self.shard.global_model.version if began is None else began)
        own = by_rank.setdefault(part.rank, [])
        if own and own[-1].last:
            own.clear()  # sent again from the beginning
            costs[part.rank] = 0
        own.append(part)
        costs[part.rank] = costs.get(part.rank, 0) + _cost(part, size)
        if len(by_rank) < site.ranks or not all(parts[-1].last for parts in by_rank.values()):
            return None
        self._costs[part.site, part.round] = sum(costs.values())
        site.forget(part.round)
        parts = [one for rank in sorted(by_rank) for one in by_rank[rank]]
        segments = sorted((segment for one in parts for segment in one.segments), key=lambda one: one.start)
        facts = self.shard.receive(part.site, part.round, tuple(segments))
        size = values_bytes(part.site, segments)
        return CompletePush(site=part.site, round=part.round, facts=facts, size=size)

    def drop(self, site: str, round_: int) -> None:
        """Forget a complete push that no round takes."""
        self.shard.drop(site, round_)
        self._costs.pop((site, round_), None)

    # -- rounds --------------------------------------------------------------------------------

    def close(self, order: CloseOrder) -> ClosedPart:
        """Close a round, and send every rank what it holds of the result."""
        closed = self.shard.close(order)
        for push in order.pushes:
            self._costs.pop((push.site, push.round), None)
            if push.site in self._sites:  # parts that were sent again, but not all of them
                self._sites[push.site].forget(push.round)
        self._forget_unfinished()
        for name, leaves_out in order.receivers.items():
            site = self._sites.get(name)
            result = closed.result.without(name) if leaves_out else closed.result
            if site is not None and site.owed is not None and site.missed is not None:
                site.missed.append(result)
            elif site is not None and site.ready and site.owed is None:
                self._send_result(name, site, result)
        return closed

    def _forget_unfinished(self) -> None:
        """Forget pushes that were begun many rounds ago and never completed: the log could not be cut before them."""
        oldest = self.shard.global_model.version - 2 * self.most_pushes
        for site in self._sites.values():
            for round_ in [round_ for round_, begun in site.begun.items() if begun < oldest]:
                site.forget(round_)

    def _send_result(self, name: str, site: _Site, result: RoundResult) -> None:
        for rank, held in site.held.items():
            for part in result_parts(result, held & self.shard.served):
                self._send(Peer(name, rank), part)

    # -- joining sites -------------------------------------------------------------------------

    def provide(self, provision: Provision) -> None:
        """Send a site what it needs to join, now or when all of its ranks have said what they hold."""
        site = self._sites.setdefault(provision.site, _Site())
        site.owed, site.missed, site.then = provision, None, None
        if provision.since is not None:
            # Now: they may be forgotten when the last rank has come, and the site has been told that it gets them.
            missed = self.shard.log.since(provision.since, self.shard.global_model.version)
            site.missed = None if missed is None else list(missed)
        elif provision.whole and self.shard.global_model.takes_gradients:
            # The site has been told the optimizer's scalars of this version: it gets these vectors, and what closes
            # before they go out comes as results.
            waits = not site.ready or provision.epoch not in (None, site.epoch)
            site.then, site.missed = self.shard.model_now() if waits else None, []
        self._pay(provision.site)

    def _pay(self, name: str) -> None:
        site = self._sites[name]
        owed = site.owed
        if owed is None or not site.ready or owed.epoch not in (None, site.epoch):
            return
        missed, site.owed, site.missed = site.missed, None, None
        if owed.whole or missed is None:
            self._send_model(name, site, owed)
        site.then = None
        for result in missed or ():
            self._send_result(name, site, result)

    def _send_model(self, name: str, site: _Site, owed: Provision) -> None:
        for rank, held in site.held.items():
            parts = self.shard.model_parts(held, owed.codec, site.then)
            if self.shard.global_model.takes_gradients:
                # Its optimizer moves all vectors at once, so the parts must be of one version.
                for part in list(parts):
                    self._send(Peer(name, rank), part)
            else:
                self._downloads[Peer(name, rank)] = parts
        self.feed()

    def feed(self) -> bool:
        """Go on with downloads as far as links take more; whether any is under way."""
        for peer, parts in list(self._downloads.items()):
            while (waiting := self._waiting_bytes(peer)) is not None and waiting < _AHEAD_BYTES:
                part = next(parts, None)
                if part is None:
                    break
                self._send(peer, part)
            else:
                if waiting is None:
                    del self._downloads[peer]  # it asks again when it is back
                continue
            del self._downloads[peer]
        return bool(self._downloads)

    # -- checkpoint ----------------------------------------------------------------------------

    def holdings(self) -> dict[str, tuple[int, dict[int, Intervals]]]:
        """For each site whose ranks have all said what they hold: their epoch, and what each holds."""
        return {name: (site.epoch, dict(site.held)) for name, site in self._sites.items() if site.ready}

    def restore_holdings(self, saved: dict[str, tuple[int, dict[int, Intervals]]]) -> None:
        """Take back what `holdings` returned."""
        for name, (epoch, held) in saved.items():
            self._sites[name] = _Site(epoch=epoch, ranks=len(held), held=dict(held))
            self.shard.set_holdings(name, [held[rank] for rank in sorted(held)])

    def unready(self) -> dict[str, list[Any]]:
        """For JSON, of each site of which not all ranks have come: its epoch, how many there are, what each holds."""
        return {
            name: [site.epoch, site.ranks, {rank: list(held.spans) for rank, held in site.held.items()}]
            for name, site in self._sites.items()
            if site.held and not site.ready
        }

    def restore_unready(self, saved: Mapping[str, list[Any]]) -> None:
        """Take back what `unready` returned: the log may go on with a part of a rank that has come."""
        for name, (epoch, ranks, held) in saved.items():
            spans = {int(rank): Intervals.of((start, stop) for start, stop in own) for rank, own in held.items()}
            self._sites[name] = _Site(epoch=epoch, ranks=ranks, held=spans)

    def forget_connections(self) -> None:
        """After a restart: ranks connect anew and say again what they hold; nobody is sent anything before."""
        for site in self._sites.values():
            site.held = {}
            site.owed = site.missed = site.then = None
        self._downloads.clear()

    @property
    def incomplete(self) -> dict[tuple[str, int], int]:
        """(site, round) of the pushes whose last part has not come, and the version at which the first one came."""
        return {(name, round_): site.begun[round_] for name, site in self._sites.items() for round_ in site.parts}


def most_spans(numel: int) -> int:
    """How many intervals the ranks of a site may hold of a model of so many parameters."""
    return _SPANS + numel // _SPAN


def _cost(part: PushPart, size: int) -> int:
    """The memory of a part of so many bytes."""
    return size + _PART_COST + _SEGMENT_COST * len(part.segments)

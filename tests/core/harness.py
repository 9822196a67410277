"""Sites and a server with queues between them instead of links: any order of events can be tried."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weightgrad import codecs
from weightgrad.codecs import Fp32, Payload
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.layout import Layout
from weightgrad.core.local_model import FlatModel
from weightgrad.core.pieces import Piece
from weightgrad.core.residual import Residual
from weightgrad.core.server.result_log import MemoryResultLog
from weightgrad.core.server.state import Outbox, ServerState
from weightgrad.core.site.state import SiteState
from weightgrad.core.site.update_shard import UpdateShard
from weightgrad.core.strategies import Strategy, find
from weightgrad.kernels.noise import derive
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.messages import Message, Push, Segment

LAYOUT = Layout.of_shapes([("a.weight", (6, 5)), ("a.bias", (6,)), ("b.weight", (4, 6)), ("b.bias", (4,))])


def noise(*numbers: int) -> Tensor:
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(derive(7, *numbers) >> 1))


def at(vector: Tensor, intervals: Intervals) -> Tensor:
    """A copy of some elements of a vector of the whole index space."""
    return torch.cat([vector[start:stop] for start, stop in intervals.spans] or [vector[:0]])


def watch_forgetting(residual: Residual, forgotten: Tensor) -> None:
    """Add everything that a residual discards, in systems that do not keep what a codec loses, to `forgotten`."""
    encode, encode_entries = residual._encode, residual._encode_entries
    places = torch.arange(forgotten.numel())

    def discard(where: Tensor) -> None:
        def forget(lost: Tensor) -> None:
            forgotten[where] += lost.double()
            lost.zero_()

        residual._discard = forget  # type: ignore[method-assign,assignment]

    def watched(piece: Piece, fresh: Tensor | None, key: int, replacement: Any) -> Payload:
        discard(at(places, piece.intervals))
        keeps_nothing = residual.vector is None and not residual._keep_loss and not isinstance(replacement, Fp32)
        before = fresh.double().clone() if keeps_nothing and fresh is not None else None
        payload = encode(piece, fresh, key, replacement)
        if before is not None:  # nothing went through memory that could be discarded
            forgotten[at(places, piece.intervals)] += before - codecs.decode(payload).double().view(-1)
        return payload

    def watched_entries(piece: Piece, own: Tensor, indices: Tensor, key: int) -> Any:
        discard(at(places, piece.intervals)[indices])
        return encode_entries(piece, own, indices, key)

    residual._encode = watched  # type: ignore[method-assign]
    residual._encode_entries = watched_entries  # type: ignore[method-assign,assignment]


class HalfModel(FlatModel):
    """Weights in bfloat16. They are kept in a float32 vector, every value of which is one of bfloat16."""

    exact = False

    def write(self, intervals: Intervals, values: Tensor) -> None:
        super().write(intervals, halved(values))

    def add(self, intervals: Intervals, values: Tensor) -> None:
        raise AssertionError("weights that round are computed anew")

    def add_segment(self, segment: Segment, mode: int, *, share: float = 1.0) -> None:
        raise AssertionError("weights that round are computed anew")

    def views(self, intervals: Intervals) -> None:
        del intervals

    def round_(self, values: Tensor, intervals: Intervals) -> Tensor:
        del intervals
        return values.copy_(halved(values))


def halved(values: Tensor) -> Tensor:
    return values.bfloat16().float()


class Harness:
    """`step`, `up`, `down`, `crash_site`, `crash_server` in any order; then `finish` and look.

    Args:
        name: the strategy.
        sites: how many sites there are.
        holdings: what the ranks of a site hold; a site that is not in it has one rank that holds everything.
        served: what each process of the server serves; None: one process serves everything.
        half: whether the sites train in bfloat16.
        optimizer: what steps where gradients are shared.
        changes: changes of the strategy.
    """

    def __init__(
        self,
        name: str,
        sites: int = 3,
        *,
        holdings: Mapping[str, Sequence[Intervals]] | None = None,
        served: Sequence[Intervals] | None = None,
        half: bool = False,
        optimizer: tuple[str, dict[str, Any]] = ("sgd", {"lr": 0.1, "momentum": 0.0}),
        **changes: Any,
    ) -> None:
        self.strategy: Strategy = find(name, changes)
        self.now = 0.0
        self.half = half
        self.served = served
        self._optimizer = optimizer
        whole = self._global_model()
        parts = [self._global_model(at(whole.vector, own), own) for own in served or ()]
        self.server = ServerState(
            whole,
            self.strategy.for_server(),
            1,
            make_log=lambda numel: MemoryResultLog(numel if parts else 4 * numel),
            parts=parts,
        )
        self.names = [f"site-{i}" for i in range(sites)]
        self.holdings = holdings or {}
        for n, held in self.holdings.items():
            self.server.set_holdings(n, held)
        self.ends = {n: self.site(n, derive(2, i)) for i, n in enumerate(self.names)}
        self.to_server: dict[str, deque[Message]] = {n: deque() for n in self.names}
        self.to_site: dict[str, deque[Message]] = {n: deque() for n in self.names}
        self.made: dict[tuple[str, int], Push] = {}
        self.included: list[tuple[str, int]] = []
        self.updates = {n: torch.zeros(LAYOUT.numel, dtype=torch.float64) for n in self.names}
        self.forgotten = {n: torch.zeros(LAYOUT.numel, dtype=torch.float64) for n in self.names}
        self.checkpoint = self.server.checkpoint()
        for n in self.names:
            self._watch_forgetting(n)
            self.server.members.join(n)
            self._send(n, self.ends[n].join())
        self.checkpoint = self.server.checkpoint()
        for n in self.names:
            self.drain(n)

    def site(self, name: str, key: int, weights: Tensor | None = None, download_codec: str | None = None) -> SiteState:
        """A site at the first global model, or with weights of its own."""
        model, plan, held = self._global_model(weights), self.strategy.for_site(), self.holdings.get(name)
        made = SiteState(name, model, plan, samples=8, key=key, download_codec=download_codec, holdings=held)
        if self.half:
            whole = Intervals.whole(LAYOUT.numel)
            locals_ = [HalfModel(made.model, whole, own) for own in held or [whole]]
            made.shards = [UpdateShard(name, LAYOUT, own, plan.for_shard, key) for own in locals_]
        if self.served is not None:
            for shard in made.shards:
                shard.served = tuple(self.served)
        return made

    def _global_model(self, weights: Tensor | None = None, held: Intervals | None = None) -> GlobalModel:
        optimizer = self._optimizer if self.strategy.shares == "gradients" else None
        weights = noise(99) if weights is None else weights
        weights = halved(weights) if self.half else weights
        return GlobalModel(LAYOUT, weights, optimizer=optimizer, rate=lambda step: 0.1, held=held)

    def come(self, name: str, download_codec: str | None) -> SiteState:
        """One more site, late and with weights of its own; its first word is on its way."""
        end = self.site(name, derive(2, len(self.names)), noise(98), download_codec)
        self.names.append(name)
        self.ends[name] = end
        self.to_server[name], self.to_site[name] = deque(), deque()
        for sums in (self.updates, self.forgotten):
            sums[name] = torch.zeros(LAYOUT.numel, dtype=torch.float64)
        self._watch_forgetting(name)
        self.server.members.join(name)
        self.checkpoint = self.server.checkpoint()
        self._send(name, end.join(same_start=False))
        return end

    def _watch_forgetting(self, name: str) -> None:
        for shard in self.ends[name].shards:
            watch_forgetting(shard.residual, self.forgotten[name])

    # -- events -----------------------------------------------------------------------------

    def step(self, name: str) -> bool:
        """One local step, if the site may."""
        end = self.ends[name]
        end.apply_results()
        if end.finishing or end.blocked(self.now) is not None:
            return False
        update = noise(self.names.index(name), end.step) * 0.1
        self.now += 0.01
        if self.strategy.shares == "gradients":
            self.updates[name] += update.double()
            end.rate = 0.1 if self.served is not None else None  # as in a deployment
            self._send(name, end.after_step(self.now, update))
        else:
            before = end.model.double().clone()
            end.model.copy_(halved(end.model + update) if self.half else end.model + update)
            self.updates[name] += end.model.double() - before
            self._send(name, end.after_step(self.now))
        return True

    def _send(self, name: str, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Push):
                self.made.setdefault((message.site, message.round), message)
            self.to_server[name].append(message)

    def up(self, name: str) -> bool:
        """The oldest message to the server arrives."""
        if not self.to_server[name]:
            return False
        self.act(self.server.receive(self.to_server[name].popleft(), self.now))
        return True

    def act(self, out: Outbox) -> None:
        for closed in out.closed:
            self.included += closed.pushes
        if out.closed:
            self.checkpoint = self.server.checkpoint()
        for name, message in out.messages:
            self.to_site[name].append(message)

    def down(self, name: str) -> bool:
        """The oldest message to a site arrives."""
        if not self.to_site[name]:
            return False
        self._send(name, self.ends[name].receive(self.to_site[name].popleft(), self.now))
        self.ends[name].apply_results()
        return True

    def drain(self, name: str) -> None:
        while self.up(name) or self.down(name):
            pass

    def crash_site(self, name: str) -> None:
        """What was on its way from and to it is gone; it comes back with its state."""
        self.to_server[name].clear()
        self.to_site[name].clear()
        self._send(name, self.ends[name].join())

    def crash_server(self) -> None:
        """Back to the last checkpoint; everything on its way is gone."""
        for n in self.names:
            self.to_server[n].clear()
            self.to_site[n].clear()
        self.act(self.server.restore(self.checkpoint))

    def time_out(self) -> None:
        """The server's next deadline passes."""
        wake = self.server.next_wake()
        if wake is not None:
            self.now = max(self.now, wake)
            self.act(self.server.wake(self.now))

    # -- the end ----------------------------------------------------------------------------

    def finish(self) -> None:
        """Every site flushes; everything is delivered until nothing moves."""
        for n in self.names:
            self.ends[n].apply_results()
        for _ in range(10_000):
            moved = False
            for n in self.names:
                end = self.ends[n]
                end.apply_results()
                if not end.finishing and end.blocked(self.now) is None:
                    self._send(n, end.finish(self.now))
                    moved = True
                moved = self.up(n) or moved
                moved = self.down(n) or moved
            if not moved:
                break
        for n in self.names:
            self.ends[n].apply_results()

    def check(self) -> None:
        """Nothing lost, nothing included twice, one global model."""
        for n, end in self.ends.items():
            assert end.finished, (n, end.blocked(self.now), end.in_flight)
            sent = torch.zeros(LAYOUT.numel)
            total = torch.zeros(LAYOUT.numel, dtype=torch.float64)
            for (site, _), push in self.made.items():
                if site == n:
                    sent.zero_()
                    for segment in push.segments:
                        segment.into(sent, 1)
                    total += sent.double()
            accounted = total + end.residual().double() + end.fresh_update().double() + self.forgotten[n]
            torch.testing.assert_close(accounted, self.updates[n], rtol=1e-4, atol=2e-5)
            assert end.version == self.server.global_model.version
            assert end.digest() == self.server.global_model.digest()
        assert sorted(self.included) == sorted(self.made), "every push is included exactly once"

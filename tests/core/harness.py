"""Sites and a server with queues between them instead of links: any order of events can be tried."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from weightgrad.core.global_model import GlobalModel
from weightgrad.core.layout import Layout
from weightgrad.core.server_state import Outbox, ServerState
from weightgrad.core.site_state import SiteState
from weightgrad.core.strategies import Strategy, find
from weightgrad.kernels.noise import derive
from weightgrad.wire.messages import Message, Push

LAYOUT = Layout.of_shapes([("a.weight", (6, 5)), ("a.bias", (6,)), ("b.weight", (4, 6)), ("b.bias", (4,))])


def noise(*numbers: int) -> Tensor:
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(derive(7, *numbers) >> 1))


class Harness:
    """`step`, `up`, `down`, `crash_site`, `crash_server` in any order; then `finish` and look."""

    def __init__(self, name: str, sites: int = 3, **changes: Any) -> None:
        self.strategy: Strategy = find(name, changes)
        self.now = 0.0
        self.server = ServerState(self._global_model(), self.strategy.for_server(), 1)
        self.names = [f"site-{i}" for i in range(sites)]
        plan = self.strategy.for_site()
        self.ends = {
            n: SiteState(n, self._global_model(), plan, samples=8, key=derive(2, i)) for i, n in enumerate(self.names)
        }
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

    def _global_model(self, weights: Tensor | None = None) -> GlobalModel:
        shares = self.strategy.shares == "gradients"
        optimizer = ("sgd", {"lr": 0.1, "momentum": 0.0}) if shares else None
        return GlobalModel(
            LAYOUT, noise(99) if weights is None else weights, optimizer=optimizer, rate=lambda step: 0.1
        )

    def come(self, name: str, download_codec: str | None) -> SiteState:
        """One more site, late and with weights of its own; its first word is on its way."""
        key = derive(2, len(self.names))
        model, plan = self._global_model(noise(98)), self.strategy.for_site()
        end = SiteState(name, model, plan, samples=8, key=key, download_codec=download_codec)
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
        residual = self.ends[name].residual
        original = residual._encode

        def encode(interval: Any, *rest: Any) -> Any:
            def forget(lost: Tensor) -> None:
                self.forgotten[name][interval.start : interval.stop] += lost.double()
                lost.zero_()

            residual._discard = forget  # type: ignore[method-assign,assignment]
            return original(interval, *rest)

        residual._encode = encode  # type: ignore[method-assign,assignment]

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
            self._send(name, end.after_step(self.now, update))
        else:
            before = end.model.double().clone()
            end.model += update
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
            fresh = (end.model - end._placement.anchor).double()
            accounted = total + end.residual.vector.double() + fresh + self.forgotten[n]
            torch.testing.assert_close(accounted, self.updates[n], rtol=1e-4, atol=2e-5)
            assert end.global_model.version == self.server.global_model.version
            assert end.global_model.digest() == self.server.global_model.digest()
        assert sorted(self.included) == sorted(self.made), "every push is included exactly once"

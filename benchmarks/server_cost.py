"""What one update costs the global server: the real `GlobalServer`, given real pushes, timed and weighed.

Seconds are of the processor (`time.process_time`, one thread). A pass is `Tensor.copy_` of as many float32.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from field_sheet import Row
from field_vectors import vectors

from weightgrad.codecs import Codec
from weightgrad.kernels import derive
from weightgrad.site.layout import Layout
from weightgrad.wan import strategies
from weightgrad.wan.base import Base
from weightgrad.wan.global_server import GlobalServer
from weightgrad.wan.messages import Part, Push, nbytes

_MOST_BYTES = 1_500_000_000  # of all sites' pushes together, which wait in memory


@dataclass(frozen=True)
class Case:
    """A row of the table of strategies, so many sites, so many parameters."""

    strategy: str
    sites: int
    numel: int


def measure(case: Case, rounds: int) -> Row | None:
    """One round to warm up, then `rounds` in order of the sites' names, then one the other way; None: too large."""
    row = strategies.find(case.strategy)
    layout = Layout.of_shapes([("weights", (case.numel,))])
    shares = row.shares == "gradients"
    base = Base(
        layout, torch.zeros(case.numel), optimizer=("sgd", {"lr": 0.1, "momentum": 0.9}) if shares else None, rate=_rate
    )
    server = GlobalServer(base, row.for_server(), derive(0, 20))
    names = [f"site-{place:03}" for place in range(case.sites)]
    first = _payloads(row.wan_codec("up"), case, 0)
    if first is None:
        return None
    for name in names:
        server.members.join(name)
    best, held, size = math.inf, 0, 0
    for number in range(1, rounds + 3):
        last = number == rounds + 2
        payloads = first if number == 1 else _payloads(row.wan_codec("up"), case, number) or first
        pushes = [_push(name, number, base.version, part) for name, part in zip(names, payloads, strict=True)]
        size = nbytes(pushes[0])
        began, spent = time.process_time(), 0.0
        for push in reversed(pushes) if last else pushes:
            if push is (pushes[0] if last else pushes[-1]):  # all but one are in: what does the server hold?
                spent += time.process_time() - began
                in_order, held = held, sum(vectors(server, least=1).values())
                began = time.process_time()
            closed = server.receive(push, float(number)).closed
        spent += time.process_time() - began
        assert closed, "a round of all sites is closed by its last push"
        if 1 < number < rounds + 2:
            best = min(best, spent)
    return {
        "strategy": case.strategy,
        "sites": case.sites,
        "numel": case.numel,
        "push_kb": size / 1e3,
        "answer_kb": nbytes(closed[0].answer) / 1e3,
        "update_ms": 1000 * best / case.sites,
        "round_ms": 1000 * best,
        "passes": best / case.sites / copy_seconds(case.numel),
        "held_mb": in_order / 1e6,
        "held_models": in_order / (4 * case.numel),
        "backwards_mb": held / 1e6,
    }


def _rate(step: int) -> float:
    del step
    return 0.1


def _payloads(codec: Codec, case: Case, number: int) -> list[Part] | None:
    """One for each site, each of its own numbers, others every round; None: too much for memory."""
    found: list[Part] = []
    for place in range(case.sites):
        update = torch.randn(case.numel, generator=torch.Generator().manual_seed(derive(number, place) >> 1))
        payload, _ = codec.encode(update, codec.init(update), derive(1, place))
        found.append(Part(0, payload))
        if payload.body.numel() * case.sites > _MOST_BYTES:
            return None
    return found


def _push(site: str, number: int, seen: int, part: Part) -> Push:
    return Push(site, number, number - 1, number, seen, 16, (part,))


def copy_seconds(numel: int, repeats: int = 5) -> float:
    """Of one pass over so many float32: the best of a few."""
    source, target = torch.randn(numel), torch.empty(numel)
    best = math.inf
    for _ in range(repeats):
        began = time.process_time()
        target.copy_(source)
        best = min(best, time.process_time() - began)
    return best

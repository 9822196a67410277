"""The time and memory that one update costs the global server, measured with the real `ServerState` and real pushes.

Times are processor time (`time.process_time`, one thread). A pass is `Tensor.copy_` of as many float32 values.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cache

import torch
from deployment.held_memory import held_bytes
from result_table import Row

from weightgrad.codecs import Codec
from weightgrad.core import strategies
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.layout import Layout
from weightgrad.core.server.state import ServerState
from weightgrad.kernels import derive
from weightgrad.wire.message_sizes import nbytes
from weightgrad.wire.messages import Push, Segment

_IN_MEMORY = 32_000_000  # values that fit into no cache
_MOST_BYTES = 1_500_000_000  # of all sites' pushes together, which wait in memory


@dataclass(frozen=True)
class Case:
    """A strategy, a number of sites and a number of parameters."""

    strategy: str
    sites: int
    numel: int


def measure(case: Case, rounds: int) -> Row | None:
    """Time the rounds of a server.

    One round warms up, then pushes come in the order of the sites' names, and in one last round in reverse order.

    Returns:
        The measurements, or None if the pushes of a round would not fit into memory.
    """
    strategy = strategies.find(case.strategy)
    layout = Layout.of_shapes([("weights", (case.numel,))])
    shares = strategy.shares == "gradients"
    base = GlobalModel(
        layout, torch.zeros(case.numel), optimizer=("sgd", {"lr": 0.1, "momentum": 0.9}) if shares else None, rate=_rate
    )
    server = ServerState(base, strategy.for_server(), derive(0, 20))
    names = [f"site-{place:03}" for place in range(case.sites)]
    first = _payloads(strategy.wan_codec("up"), case, 0)
    if first is None:
        return None
    for name in names:
        server.members.join(name)
    best, held, size = math.inf, 0, 0
    for number in range(1, rounds + 3):
        last = number == rounds + 2
        payloads = first if number == 1 else _payloads(strategy.wan_codec("up"), case, number) or first
        pushes = [_push(name, number, base.version, part) for name, part in zip(names, payloads, strict=True)]
        size = nbytes(pushes[0])
        began, spent = time.process_time(), 0.0
        for push in reversed(pushes) if last else pushes:
            if push is (
                pushes[0] if last else pushes[-1]
            ):  # all pushes but one have come: measure what the server holds
                spent += time.process_time() - began
                in_order, held = held, sum(held_bytes(server, least=1).values())
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
        "result_kb": nbytes(closed[0].result) / 1e3,
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


def _payloads(codec: Codec, case: Case, number: int) -> list[Segment] | None:
    """One segment for each site, all different and new in every round; None if they would not fit into memory."""
    found: list[Segment] = []
    for place in range(case.sites):
        update = torch.randn(case.numel, generator=torch.Generator().manual_seed(derive(number, place) >> 1))
        payload, _ = codec.encode(update, codec.init(update), derive(1, place))
        found.append(Segment(0, payload))
        if payload.body.numel() * case.sites > _MOST_BYTES:
            return None
    return found


def _push(site: str, number: int, seen: int, part: Segment) -> Push:
    return Push(site=site, round=number, after=number - 1, step=number, seen=seen, samples=16, segments=(part,))


@cache
def pass_seconds(numel: int) -> float:
    """Seconds of one pass over so many float32 values in memory; a small model is not measured in the cache."""
    return copy_seconds(_IN_MEMORY) / _IN_MEMORY * numel


def copy_seconds(numel: int, repeats: int = 5) -> float:
    """Seconds of one pass over so many float32 values, the best of several."""
    source, target = torch.randn(numel), torch.empty(numel)
    best = math.inf
    for _ in range(repeats):
        began = time.process_time()
        target.copy_(source)
        best = min(best, time.process_time() - began)
    return best

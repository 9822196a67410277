"""What a simulation is told: places, links, faults, strategy, schedule. Values only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weightgrad.sim.compute import Compute
from weightgrad.sim.lan import Lan
from weightgrad.sim.links import Link
from weightgrad.wan.strategies import Strategy


@dataclass(frozen=True)
class SitePlace:
    """A site: its workers and what they have."""

    name: str
    workers: int
    lan: Lan
    compute: Compute


@dataclass(frozen=True)
class Fault:
    """One scheduled event. what: cut, slow, flap (a link); kill, leave, join (a site; kill: the server too)."""

    at: float
    what: str
    where: tuple[str, ...]
    seconds: float | None = None  # how long; None: for good
    factor: float = 0.0  # slow: the share of the bandwidth that is left
    period: float = 1.0  # flap: seconds of one off and on


@dataclass(frozen=True, kw_only=True)
class WorldPlan:
    """Everything but the task."""

    server: str
    server_bit_s: float | None
    sites: tuple[SitePlace, ...]
    links: tuple[Link, ...]
    strategy: Strategy
    steps: int
    optimizer: tuple[str, Mapping[str, Any]]
    rate: Callable[[int], float]
    seed: int = 0
    evaluate_every: int = 100
    ema: float | None = None
    clip_norm: float | None = None
    codec_speed: float = 1.0
    step_overhead: float = 0.0  # seconds of a step that are neither computing nor codec nor network
    message_overhead: float = 0.0  # seconds to send or to receive a message
    faults: tuple[Fault, ...] = ()
    absent: frozenset[str] = frozenset()  # sites that are not there at the start

"""The plan of a simulation: sites, links, faults, strategy and training. Values only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weightgrad.core.strategies import Strategy
from weightgrad.lab.sim.compute import Compute
from weightgrad.lab.sim.links import Link
from weightgrad.lab.sim.local_network import LocalNetwork


@dataclass(frozen=True)
class SiteSpec:
    """A site: its name, its number of workers, their network, their speed, and whether the model is sharded."""

    name: str
    workers: int
    lan: LocalNetwork
    compute: Compute
    sharded: bool = False


@dataclass(frozen=True)
class Fault:
    """One entry of the fault schedule.

    Attributes:
        at: When it begins, in virtual seconds.
        what: cut, slow or flap (of a link); kill, leave or join (of a site; kill also of the server).
        where: The two ends of the link, or the sites, or the server.
        seconds: How long it lasts; None means for good.
        factor: For slow: the fraction of the bandwidth that remains.
        period: For flap: seconds of one cut and the pause after it.
    """

    at: float
    what: str
    where: tuple[str, ...]
    seconds: float | None = None
    factor: float = 0.0
    period: float = 1.0


@dataclass(frozen=True, kw_only=True)
class SimulationPlan:
    """Everything that a simulation depends on, except the task.

    Attributes:
        server: Name of the global server.
        server_bit_s: Bandwidth of its network card; None means unlimited.
        sites: The sites.
        links: The WAN links.
        strategy: The strategy.
        steps: Training steps of every site.
        optimizer: Name and options of the optimizer.
        rate: The learning rate as a function of the step, counted from 0.
        seed: The seed that every random number follows from.
        evaluate_every: Steps between two evaluations.
        ema: Decay of the running average of the global model; None means no average.
        clip_norm: Largest gradient norm of a layer; None means no clipping.
        codec_speed: Speed of the codecs relative to the measured table.
        step_overhead: Seconds of a step that are neither compute nor codec nor network.
        message_overhead: Seconds to send or to receive a message.
        faults: The fault schedule.
        absent: Sites that are not there at the start.
        server_processes: Processes of the global server.
    """

    server: str
    server_bit_s: float | None
    sites: tuple[SiteSpec, ...]
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
    step_overhead: float = 0.0
    message_overhead: float = 0.0
    faults: tuple[Fault, ...] = ()
    absent: frozenset[str] = frozenset()
    server_processes: int = 1

"""What is planned: a model, sites with devices, links and training, from a recipe or from the command line."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightgrad import units, wire
from weightgrad.core import pieces
from weightgrad.core.layout import Layout
from weightgrad.core.strategies import Strategy
from weightgrad.errors import PlanError, UnitError
from weightgrad.lab.plan.devices import Device, find
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.simulation import NEAR, NEAR_BITS, optimizer_options, rate_of
from weightgrad.lab.sim.compute import Compute, Straggler
from weightgrad.lab.sim.links import Link
from weightgrad.lab.sim.local_network import LocalNetwork
from weightgrad.lab.sim.plan import SimulationPlan, SiteSpec

_LAN_BIT_S = 100e9  # of a network between machines
_LAN_SECONDS = 2e-5
_MACHINE = 8  # devices of one machine, which its interconnect joins
_SITE = re.compile(r"([\w.-]+)\s*=\s*(?:(\d+)\s*x\s*)?([\w.-]+)")
_NEXT_LINK = re.compile(r"\s+(?=[^\s=,]+\s*=)")  # spaces within a link separate nothing
_LEAST_BIT_S, _LONGEST_S = 1.0, 3600.0  # of a link
_MOST_DEVICES = 9999  # of a site: every replica of a model that is not sharded is played


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Everything that a prediction depends on, except the strategy.

    Attributes:
        name: what it is called.
        layout: where the parameters lie.
        server: the name of the global server.
        server_bit_s: its bandwidth; None: unlimited.
        sites: the sites; their `compute` is forward and backward of one worker.
        links: the links.
        batch: samples of a step over all workers.
        steps: steps of the whole run.
        optimizer: name and options.
        rate: the learning rate by step.
        seed: of jitter and random codecs.
        codec_speed: speed of the codecs relative to the measured table.
        step_overhead: seconds of a step that are neither compute nor codec nor network.
        message_overhead: seconds to send or to receive a message.
        server_processes: processes of the global server.
        clip_norm: largest gradient norm, or None.
    """

    name: str
    layout: Layout
    server: str
    sites: tuple[SiteSpec, ...]
    links: tuple[Link, ...]
    batch: int
    steps: int
    optimizer: tuple[str, Mapping[str, Any]]
    rate: Callable[[int], float]
    server_bit_s: float | None = None
    seed: int = 0
    codec_speed: float = 1.0
    step_overhead: float = 0.0
    message_overhead: float = 0.0
    server_processes: int = 1
    clip_norm: float | None = None

    def link_of(self, site: str) -> Link:
        """The link between a site and the global server."""
        for link in self.links:
            if set(link.between) == {site, self.server}:
                return link
        raise PlanError(f"no link between {site} and the global server {self.server}; add one with --link")

    def rates(self, site: str) -> tuple[float, float]:
        """Bytes a second that a link carries towards the global server and back, when it has nothing else to do."""
        link = self.link_of(site)
        upward = link.rate_bytes(0.0, back=link.between[0] == self.server)
        return upward, link.rate_bytes(0.0, back=link.between[0] != self.server)

    @property
    def workers(self) -> int:
        """Workers of all sites."""
        return sum(site.workers for site in self.sites)

    def fitted(self, strategy: Strategy) -> Strategy:
        """The strategy with the parts for the optimizer and the overlap that hides a round, as a run would set them."""
        shortest = min(site.compute.seconds_per_step for site in self.sites)
        near = self._round_seconds(self.layout.numel * NEAR_BITS) <= NEAR * shortest
        strategy = strategy.with_optimizer(self.optimizer[0], near=near)
        if not strategy.hide:
            return strategy
        bits = 8.0 * sum(_sampled_bytes(strategy, way, self.layout.numel) for way in ("up", "down"))
        needed = math.ceil(self._round_seconds(bits) / shortest) if shortest > 0 else strategy.hide
        return dataclasses.replace(strategy, overlap=max(1, min(needed, strategy.hide)))

    def _round_seconds(self, bits: float) -> float:
        """Seconds from a push to its result on the slowest link, with so many bits both ways together."""
        links = [self.link_of(site.name) for site in self.sites]
        least = [(link, min(link.bandwidth_bit_s, link.back_bit_s or link.bandwidth_bit_s)) for link in links]
        return max(2 * link.delay_seconds + bits / rate for link, rate in least)

    def plan(self, strategy: Strategy, steps: int) -> SimulationPlan:
        """The plan of a simulation of some steps."""
        return SimulationPlan(
            server=self.server,
            server_bit_s=self.server_bit_s,
            sites=self.sites,
            links=self.links,
            strategy=self.fitted(strategy),
            steps=steps,
            optimizer=self.optimizer,
            rate=self.rate,
            seed=self.seed,
            evaluate_every=2**31,
            clip_norm=self.clip_norm,
            codec_speed=self.codec_speed,
            step_overhead=self.step_overhead,
            message_overhead=self.message_overhead,
            server_processes=self.server_processes,
        )


def _sampled_bytes(strategy: Strategy, way: str, numel: int) -> float:
    """The bytes of a vector, from a sample of it that fits into memory."""
    codec, count = strategy.wan_codec(way), min(numel, pieces.PIECE)
    sample = torch.randn(count, generator=torch.Generator().manual_seed(0))
    payload, _ = codec.encode(sample, codec.init(sample), 0)
    return wire.frame_bytes(payload) * numel / count


def of_recipe(recipe: Recipe, layout: Layout, seconds: Mapping[str, float]) -> Scenario:
    """The scenario of a recipe; its faults are left out.

    Args:
        recipe: the recipe.
        layout: of its model.
        seconds: the step time of the sites whose recipe has none (`calibrate`), by name.
    """
    sites = []
    for site in recipe.site_list:
        own = site.compute.seconds_per_step
        slow = tuple(Straggler(s.factor, s.site, s.worker, s.probability) for s in site.compute.stragglers)
        compute = Compute(seconds[site.name] if own == "calibrate" else float(own), site.compute.jitter, slow)
        lan = LocalNetwork(site.lan.bandwidth_bit_s, site.lan.delay_seconds)
        sites.append(SiteSpec(site.name, site.workers, lan, compute, site.sharding == "fsdp2"))
    links = tuple(
        Link(x.between, x.bandwidth_bit_s, x.delay_seconds, x.loss, x.trace, x.back_bit_s) for x in recipe.link_list
    )
    training = recipe.training
    return Scenario(
        name=recipe.name,
        layout=layout,
        server=recipe.server.name,
        server_bit_s=recipe.server.bandwidth_bit_s,
        sites=tuple(sites),
        links=links,
        batch=training.batch,
        steps=training.steps,
        optimizer=(training.optimizer.name, optimizer_options(training.optimizer)),
        rate=rate_of(recipe),
        seed=recipe.seed,
        codec_speed=recipe.compute.codec_speed,
        step_overhead=recipe.compute.step_overhead_seconds,
        message_overhead=recipe.compute.message_overhead_seconds,
        server_processes=recipe.server.processes,
        clip_norm=training.clip_norm,
    )


@dataclass(frozen=True)
class SiteGiven:
    """A site of the command line: `virginia=8xH100`."""

    name: str
    count: int
    device_name: str
    device: Device

    @property
    def lan(self) -> LocalNetwork:
        """What joins its devices: the interconnect of one machine, or the network between several."""
        inside = self.device.interconnect_gb_s
        fast = inside is not None and self.count <= _MACHINE
        return LocalNetwork(8e9 * inside if fast and inside is not None else _LAN_BIT_S, _LAN_SECONDS)


def parse_sites(text: str, devices: Mapping[str, Device]) -> tuple[SiteGiven, ...]:
    """Read `virginia=8xH100,tokyo=4xA100`.

    Raises:
        PlanError: it is not that, or names a site twice.
    """
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _SITE.fullmatch(part)
        if match is None:
            raise PlanError(f"--sites: {part!r} is not a site; wanted NAME=COUNTxDEVICE, e.g. virginia=8xH100")
        count = int(match[2] or 1)
        if not 1 <= count <= _MOST_DEVICES:
            raise PlanError(f"--sites: {part!r} has {match[2]} devices; wanted from 1 to {_MOST_DEVICES:,}")
        found.append(SiteGiven(match[1], count, match[3], find(devices, match[3])))
    if not found:
        raise PlanError("--sites: no site; wanted e.g. virginia=8xH100,tokyo=4xA100")
    _refuse_twice("--sites", [site.name for site in found])
    return tuple(found)


def parse_links(texts: Iterable[str], sites: Sequence[str]) -> tuple[str, tuple[Link, ...]]:
    """Read `ohio-virginia=1Gbit/s,11ms` once or several times: bandwidth, one-way delay, and perhaps loss as 0.1%.

    Args:
        texts: what was written after `--link`; several links may stand in one text, separated by spaces.
        sites: the names of the sites.

    Returns:
        The name of the global server, which every link has besides a site; and the links.

    Raises:
        PlanError: a link cannot be read, or a site has none.
    """
    links, servers = [], []
    for text in (part for given in texts for part in _NEXT_LINK.split(given.strip()) if part):
        ends, _, values = text.partition("=")
        ends = ends.strip()
        joined = [name for name in sites if ends.startswith(f"{name}-") or ends.endswith(f"-{name}")]
        site = max(joined, key=len, default=None)  # "us-east-1-ohio" is a link of us-east-1, not of us-east
        server = "" if site is None else _other_end(ends, site)
        if site is None or not values or not server:
            known = ", ".join(sites)
            raise PlanError(
                f"--link: {text!r} joins no site; wanted SERVER-SITE=BANDWIDTH,DELAY, e.g. ohio-virginia=1Gbit/s,11ms, "
                f"with one of {known}"
            )
        if server in sites:
            raise PlanError(
                f"--link: {text!r} joins two sites; wanted links between each site and a global server, which does not "
                "train and has a name of its own, e.g. ohio"
            )
        servers.append(server)
        links.append(_link((server, site), values, text))
    if len(set(servers)) > 1:
        raise PlanError(f"--link: the links end at {', '.join(sorted(set(servers)))}; wanted one global server for all")
    if missing := [name for name in sites if not any(name in link.between for link in links)]:
        raise PlanError(f"--link: no link for {', '.join(missing)}; wanted one for every site")
    _refuse_twice("--link", [link.between[1] for link in links])
    return servers[0], tuple(links)


def _other_end(ends: str, site: str) -> str:
    return ends.removeprefix(f"{site}-") if ends.startswith(f"{site}-") else ends.removesuffix(f"-{site}")


def _link(between: tuple[str, str], values: str, text: str) -> Link:
    parts = [part.strip() for part in values.split(",")]
    if not 2 <= len(parts) <= 3:
        raise PlanError(
            f"--link: {text!r} has {len(parts)} value{'' if len(parts) == 1 else 's'}; wanted bandwidth and one-way "
            "delay, and perhaps loss, e.g. ohio-virginia=1Gbit/s,11ms,0.1%"
        )
    try:
        bandwidth, delay = units.bit_s(parts[0]), units.seconds(parts[1])
    except UnitError as error:
        raise PlanError(f"--link: {text!r}: {error}") from None
    for part, value, example in ((parts[0], bandwidth, "1Gbit/s"), (parts[1], delay, "11ms")):
        if value and part[-1:].isdigit():  # 11 seconds are hardly ever meant
            raise PlanError(f"--link: {text!r}: {part} has no unit; wanted e.g. {example}")
    loss = _loss(parts[2], text) if len(parts) == 3 else 0.0
    if bandwidth < _LEAST_BIT_S or delay > _LONGEST_S:
        raise PlanError(f"--link: {text!r}: wanted a bandwidth of 1 bit/s or more and a delay of an hour or less")
    return Link(between, bandwidth, delay, loss)


def _loss(written: str, text: str) -> float:
    """The share of packets that are lost: 0.1% or 0.001."""
    try:
        found = float(written.removesuffix("%")) / (100 if written.endswith("%") else 1)
    except ValueError:
        found = -1.0
    if not 0 <= found < 1:
        raise PlanError(f"--link: {text!r}: {written} is not a loss; wanted e.g. 0.1%, from 0 to below 100 %")
    return found


def _refuse_twice(option: str, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PlanError(f"{option}: {', '.join(twice)} is there twice; wanted each site once")

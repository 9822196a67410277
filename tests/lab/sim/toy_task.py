"""A task without data: each site pulls the weights towards a point of its own, with some noise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightgrad import event_log
from weightgrad.core.layout import Layout
from weightgrad.core.strategies import find
from weightgrad.kernels.noise import derive
from weightgrad.lab.sim.compute import Compute
from weightgrad.lab.sim.links import Link
from weightgrad.lab.sim.local_network import LocalNetwork
from weightgrad.lab.sim.plan import SimulationPlan, SiteSpec
from weightgrad.lab.sim.simulator import Simulator
from weightgrad.lab.sim.task import Gradient, Score


class Toy:
    """Gradients w - target + noise; accuracy is how near the middle of the targets one is."""

    epoch_steps = 10

    def __init__(self, sites: int, workers: int = 2) -> None:
        self.layout = Layout.of_shapes([("a.weight", (8, 6)), ("a.bias", (8,)), ("b.weight", (6, 8)), ("b.bias", (6,))])
        self._workers = workers
        self._targets = [self._random(1, s) for s in range(sites)]

    def _random(self, *parts: int) -> Tensor:
        return torch.randn(self.layout.numel, generator=torch.Generator().manual_seed(derive(5, *parts) >> 1))

    def initial(self) -> Tensor:
        return self._random(0)

    def samples(self, site: int) -> int:
        return 4 * self._workers

    def gradients(self, site: int, weights: Tensor, step: int) -> Iterator[Gradient]:
        for worker in range(self._workers):
            away = weights - self._targets[site] + 0.1 * self._random(2, site, worker, step)
            yield Gradient(away, float(away.square().mean()))

    def evaluate(self, weights: Tensor) -> Score:
        away = float((weights - torch.stack(self._targets).mean(0)).square().mean())
        return Score(1 / (1 + away), away)


def plan(
    name: str = "baseline", *, sites: int = 3, workers: int = 2, changes: dict[str, Any] | None = None, **more: Any
) -> SimulationPlan:
    """A simulation of equal sites with links of different speed."""
    names = [f"site-{i}" for i in range(sites)]
    settings: dict[str, Any] = {
        "server": "hub",
        "server_bit_s": None,
        "sites": tuple(SiteSpec(n, workers, LocalNetwork(1e9, 1e-4), Compute(0.01, 0.1)) for n in names),
        "links": tuple(Link(("hub", n), 1e6 * (i + 1), 0.01 * (i + 1)) for i, n in enumerate(names)),
        "strategy": find(name, changes or {}),
        "steps": 40,
        "optimizer": ("sgd", {"lr": 0.1, "momentum": 0.5}),
        "rate": lambda step: 0.1,
        "evaluate_every": 10,
    }
    return SimulationPlan(**{**settings, **more})


def run(directory: Path, made: SimulationPlan, workers: int = 2) -> tuple[Simulator, list[dict[str, Any]]]:
    """Run a plan; returns the simulator and the event log."""
    path = directory / "events.jsonl"
    with event_log.EventLog(path, replace=True) as events_log:
        simulator = Simulator(made, Toy(len(made.sites), workers), events_log)
        simulator.run()
    return simulator, event_log.read(path)


def assert_one_model(simulator: Simulator) -> None:
    """Every site that is there has the server's global model."""
    for site in simulator.sites:
        if site.alive and not site.left:
            assert site.state.version == simulator.server.global_model.version
            assert site.state.digest() == simulator.server.global_model.digest()


def assert_finished_with_one_model(simulator: Simulator) -> None:
    """Every site has finished, and has the server's global model."""
    assert simulator.status == "finished"
    assert all(site.alive and site.state.finished for site in simulator.sites)
    assert_one_model(simulator)

"""A task without data: each site pulls the weights towards a point of its own, with some noise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightgrad import ledger
from weightgrad.kernels.noise import derive
from weightgrad.sim.compute import Compute
from weightgrad.sim.lan import Lan
from weightgrad.sim.links import Link
from weightgrad.sim.plan import SitePlace, WorldPlan
from weightgrad.sim.task import Gradient, Score
from weightgrad.sim.world import World
from weightgrad.site.layout import Layout
from weightgrad.wan.strategies import find


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
) -> WorldPlan:
    """A world of equal sites with links of unequal speed."""
    names = [f"site-{i}" for i in range(sites)]
    settings: dict[str, Any] = {
        "server": "hub",
        "server_bit_s": None,
        "sites": tuple(SitePlace(n, workers, Lan(1e9, 1e-4), Compute(0.01, 0.1)) for n in names),
        "links": tuple(Link(("hub", n), 1e6 * (i + 1), 0.01 * (i + 1)) for i, n in enumerate(names)),
        "strategy": find(name, changes or {}),
        "steps": 40,
        "optimizer": ("sgd", {"lr": 0.1, "momentum": 0.5}),
        "rate": lambda step: 0.1,
        "evaluate_every": 10,
    }
    return WorldPlan(**{**settings, **more})


def run(directory: Path, made: WorldPlan, workers: int = 2) -> tuple[World, list[dict[str, Any]]]:
    """The plan's world after its run, and its ledger."""
    path = directory / "ledger.jsonl"
    with ledger.Ledger(path, replace=True) as book:
        world = World(made, Toy(len(made.sites), workers), book)
        world.run()
    return world, ledger.read(path)


def assert_one_base(world: World) -> None:
    """Every site that is there has the server's base."""
    for one in world.sites:
        if one.alive and not one.left:
            assert one.end.base.version == world.server.base.version
            assert one.end.base.digest() == world.server.base.digest()


def assert_finished_with_one_base(world: World) -> None:
    """The same, and all have ended."""
    assert world.status == "finished"
    assert all(one.alive and one.end.finished for one in world.sites)
    assert_one_base(world)

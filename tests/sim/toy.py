"""A task without data: each site pulls the weights towards a point of its own, with some noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from weightgrad.kernels.noise import derive
from weightgrad.sim.compute import Compute
from weightgrad.sim.lan import Lan
from weightgrad.sim.links import Link
from weightgrad.sim.plan import SitePlace, WorldPlan
from weightgrad.sim.task import Gradient, Score
from weightgrad.site.layout import Layout
from weightgrad.wan.strategies import find


class Toy:
    """Gradients w - target + noise; accuracy is how near the middle of the targets one is."""

    separate = False
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

    def gradient(self, site: int, weights: Tensor, step: int) -> Gradient:
        found = list(self.gradients(site, weights, step))
        return Gradient(torch.stack([g.vector for g in found]).mean(0), sum(g.loss for g in found) / len(found))

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

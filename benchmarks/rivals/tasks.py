"""What all rivals train, and over which links: the same recipe, with nothing changed but the strategy.

Two sites of one worker are joined by one link. WeightGrad's global server stands on the first site's host, so its
rounds cross that same link once each way, as the gradients of two ranks do; the recipe says so with a first
link that is no obstacle.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from weightgrad.lab.emulate.topology import WanLink
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.emulation import LINE

SITES = ("east", "west")
WARM = 0.2  # of the steps are not counted in the mean: connections open, hooks warm up, `auto` looks around


@dataclass(frozen=True)
class Link:
    """The link between the sites: the rate of a TCP stream, and the round-trip time."""

    mbit_s: float
    rtt_ms: float

    def __str__(self) -> str:
        return f"{self.mbit_s:g} Mbit/s, {self.rtt_ms:g} ms"

    def wan_link(self) -> WanLink:
        """The link for the emulator, which takes the raw rate and the delay of one direction."""
        return WanLink(SITES, self.mbit_s * 1e6 * LINE, self.rtt_ms / 2e3)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Model, data and schedule. A pass takes `seconds` for every rival; this machine needs a fraction of that."""

    data: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    batch: int
    rate: float
    seconds: float
    steps: int
    evaluate_every: int
    evaluate_on: int

    def recipe(self, link: Link, steps: int, strategy: str = "baseline", seed: int = 0) -> Recipe:
        """The recipe, the same for all rivals. The strategy matters only for WeightGrad."""
        text = {
            "name": "rivals",
            "seed": seed,
            "data": {"name": self.data},
            "model": {"name": self.model, "options": self.options},
            "training": {
                "steps": steps,
                "batch": self.batch,
                "optimizer": {"name": "sgd", "lr": self.rate, "momentum": 0.9},
                "schedule": "cosine",
                "evaluate_every": self.evaluate_every,
                "evaluate_on": self.evaluate_on,
            },
            "server": {"name": "hub"},
            "sites": [{"name": name, "workers": 1} for name in SITES],
            "links": [
                {"between": ["hub", SITES[0]], "bandwidth": "10 Gbit/s", "delay": "0 ms"},
                {
                    "between": ["hub", SITES[1]],
                    "bandwidth": f"{link.mbit_s} Mbit/s",
                    "delay": f"{link.rtt_ms / 2} ms",
                },
            ],
            "compute": {"seconds_per_step": self.seconds},
            "strategy": {"name": strategy, "t_global": None},  # a site that starts late on a busy machine is waited for
        }
        return Recipe.parse(json.dumps(text), "rivals.yaml")


TASKS = {
    "digits": Task(
        data="digits",
        model="lenet-digits",
        batch=64,
        rate=0.05,
        seconds=0.04,
        steps=120,
        evaluate_every=5,
        evaluate_on=600,
    ),
    "fashion": Task(
        data="fashion-mnist",
        model="mlp",
        options={"width": 256, "depth": 2},
        batch=64,
        rate=0.05,
        seconds=0.04,
        steps=80,
        evaluate_every=5,
        evaluate_on=2000,
    ),
    "cifarnet": Task(
        data="cifar10",
        model="cifarnet",
        batch=32,
        rate=0.02,
        seconds=0.15,
        steps=80,
        evaluate_every=10,
        evaluate_on=1000,
    ),
}

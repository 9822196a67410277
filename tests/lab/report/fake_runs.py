"""Run directories as the simulator writes them, without a simulator: curves that look like training.

`python tests/report/fake_runs.py DIR` writes six strategies with two seeds each, to look at a report.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.simulation import Progress, chosen_strategy

RECIPE = """
name: paper
data: {name: digits}
model: {name: lenet-digits}
training: {steps: 300, batch: 128, optimizer: {name: sgd, lr: 0.05}}
server: {name: ohio}
sites: [{name: virginia, workers: 4}, {name: california, workers: 4}]
links:
  - {between: [ohio, virginia], bandwidth: 300 Mbit/s, delay: 11 ms}
  - {between: [ohio, california], bandwidth: 110 Mbit/s, delay: 25 ms}
compute: {seconds_per_step: 0.03}
"""
SITES = ("virginia", "california")
SERVER = "ohio"


@dataclass(frozen=True)
class Traits:
    """How a strategy behaves: what it ends with, how long a step takes, what a step sends over the WAN."""

    accuracy: float
    step_seconds: float
    wan_bytes: int  # a step
    waiting: float  # share of the time
    every: int = 1  # steps a round


TRAITS = {
    "baseline": Traits(0.711, 0.62, 17_092_768, 0.93),
    "gaia": Traits(0.708, 0.21, 3_100_000, 0.71),
    "terngrad": Traits(0.694, 0.17, 1_070_000, 0.60),
    "dgc": Traits(0.711, 0.11, 68_000, 0.35, 2),
    "weightgrad": Traits(0.713, 0.075, 16_000, 0.05, 8),
    "diloco": Traits(0.645, 0.073, 340_000, 0.04, 50),
}
FAULTS: list[tuple[float, str, list[str]]] = [
    (20.0, "cut", ["ohio", "virginia"]),
    (32.0, "heal", ["ohio", "virginia"]),
    (60.0, "kill", ["california"]),
    (75.0, "return", ["california"]),
    (90.0, "join", ["sydney"]),
]


def recipe(name: str = "paper", steps: int = 300, strategy: str = "weightgrad", seed: int = 0) -> Recipe:
    settings = [f"name={name}", f"training.steps={steps}", f"training.evaluate_every={max(1, steps // 20)}"]
    return Recipe.parse(RECIPE).with_settings([*settings, f"strategy={strategy}", f"seed={seed}"])


def simulate(
    recipe: Recipe,
    out: Path,
    *,
    watch: Callable[[Progress], None] | None = None,
    faults: bool = False,
    status: str = "finished",
    sites: tuple[str, ...] = SITES,
) -> dict[str, object]:
    """Write a plausible run; the same recipe gives the same bytes."""
    values = recipe.dump()
    name, seed, steps = recipe.strategy.name, recipe.seed, recipe.training.steps
    traits = TRAITS.get(name, TRAITS["gaia"])
    noise = random.Random(f"{name} {seed}")
    shift, every = noise.gauss(0, 0.003), values["training"]["evaluate_every"]
    lines: list[dict[str, Any]] = [
        {
            "kind": "run",
            "t": 0,
            "name": values["name"],
            "strategy": name,
            "parts": chosen_strategy(recipe).to_dict(),
            "seed": seed,
        }
        | {"steps": steps, "parameters": 1068298, "sites": list(sites), "workers": 4 * len(sites), "recipe": values}
    ]
    last = steps if status == "finished" else steps // 2
    accuracy, loss, t, wan, version = 0.1, 2.3, 0.0, 0, 0
    for step in range(1, last + 1):
        t = step * traits.step_seconds * (1 + 0.01 * math.sin(step / 9))
        wan = step * traits.wan_bytes
        part = step / steps
        loss = 2.3 * math.exp(-3 * part) + 0.55 + noise.gauss(0, 0.06)
        for place, site in enumerate(sites):
            spread = noise.gauss(0, 0.05)
            lines.append({"kind": "step", "t": t + place / 500, "site": site, "step": step, "loss": loss + spread})
        if step % traits.every == 0:
            version += 1
            moved = traits.wan_bytes * traits.every // 2
            lines.append(
                {"kind": "round", "t": t, "version": version, "step": step, "senders": list(sites)}
                | {"up_bytes": moved, "down_bytes": moved, "digest": f"{step:016x}"}
            )
        if step % every == 0 or step == last:
            accuracy = 0.1 + (traits.accuracy + shift - 0.1) * (1 - math.exp(-4.5 * part)) / (1 - math.exp(-4.5))
            accuracy += noise.gauss(0, 0.006) * (1 - part)
            lines.append(
                {"kind": "evaluate", "t": t, "step": step, "version": version, "accuracy": accuracy, "loss": loss}
                | {
                    "global_model_accuracy": accuracy,
                    "ema_accuracy": None,
                    "wan_bytes": wan,
                    "lan_bytes": step * 34_000_000,
                }
                | {"quantized_accuracy": accuracy - 0.004 if name == "weightgrad" else None}
            )
        if watch is not None:
            watch(Progress(step, steps, loss, accuracy, t, wan, step * 34_000_000))
    if faults:
        fault_lines = [{"kind": "fault", "t": at, "what": what, "where": where} for at, what, where in FAULTS]
        lines = lines[:1] + sorted(lines[1:] + fault_lines, key=lambda line: float(line["t"]))
    for place, site in enumerate(sites):
        half = wan // (2 * len(sites))
        lines.append({"kind": "link", "t": t, "between": [SERVER, site], "bytes": [half + place, half]})
    for site in sites:
        lines.append(
            {"kind": "site", "t": t, "site": site, "compute_seconds": 0.03 * last, "codec_seconds": 0.004 * last}
            | {"lan_seconds": 0.006 * last, "waiting_seconds": t * traits.waiting, "lan_bytes": 17_000_000 * last}
            | {"steps": last}
        )
    lines.append({"kind": "end", "t": t, "status": status})
    summary = {
        "name": values["name"],
        "strategy": name,
        "seed": seed,
        "status": status,
        "steps": last,
        "accuracy": accuracy,
        "global_model_accuracy": accuracy,
        "quantized_accuracy": accuracy - 0.004 if name == "weightgrad" else None,
        "ema_accuracy": None,
        "loss": loss,
        "virtual_seconds": t,
        "wan_bytes": wan,
        "lan_bytes": last * 34_000_000,
        "waiting_share": traits.waiting,
        "rounds": version,
        "parameters": 1068298,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "events.jsonl").write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))
    (out / "summary.json").write_text(json.dumps(summary))
    (out / "recipe.yaml").write_text(recipe.to_yaml())
    (out / "wall.json").write_text(json.dumps({"cores": 2, "torch": "2.9", "date": "2026-11-16T01:02:03+00:00"}))
    return dict(summary)


def write_all(
    out: Path, *, steps: int = 300, seeds: int = 2, faults: bool = False, sites: tuple[str, ...] = SITES
) -> list[Path]:
    """Every strategy with every seed."""
    directories = []
    for strategy in TRAITS:
        for seed in range(seeds):
            directory = out / strategy / f"seed-{seed}"
            simulate(recipe(steps=steps, strategy=strategy, seed=seed), directory, faults=faults, sites=sites)
            directories.append(directory)
    return directories


if __name__ == "__main__":
    write_all(Path(sys.argv[1]), steps=1500, faults="--faults" in sys.argv)

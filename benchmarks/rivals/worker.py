"""One worker of a rival, on its own emulated host, in the directory of the run.

    python -m rivals.worker RIVAL RANK ADDRESS,ADDRESS

It makes itself ready, says so with a file, waits for the start, trains, and keeps a copy of its weights at the
steps where the recipe evaluates; nothing is evaluated while the clock runs. Times are the machine's monotonic clock,
which all processes share.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from rivals.rival import Rival, Worker
from rivals.spec import Spec
from rivals.timed_pass import TimedPass
from safetensors.torch import save_file
from torch import Tensor

from weightgrad.core import optimizers
from weightgrad.core.optimizers.learning_rates import set_rate
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.simulation import optimizer_options, rate_of
from weightgrad.lab.run.task import Training

_POLL_SECONDS = 0.005
_FILES = {
    "alone": "rival_alone",
    "torchft": "rival_torchft",
    "hivemind": "rival_hivemind",
}  # the others are PyTorch's own


def run(spec: Spec, rank: int, addresses: list[str]) -> None:
    """Train, and write `worker-RANK.json` and `worker-RANK.safetensors`."""
    recipe = Recipe.load("recipe.yaml")
    task = Training(recipe)
    module, layout = task.module, task.layout
    chosen = recipe.training.optimizer
    optimizer = optimizers.build(chosen.name, list(module.parameters()), optimizer_options(chosen))
    timed = TimedPass(module, float(recipe.compute.seconds_per_step))
    make = importlib.import_module(f"rivals.{_FILES.get(spec.name, 'rival_ddp')}").make
    rival: Rival = make(Worker(rank, addresses, recipe, task, module, optimizer, spec.options), spec.name)
    rate, steps, every = rate_of(recipe), recipe.training.steps, recipe.training.evaluate_every
    _until_started(rank)
    began, ends, kept = time.monotonic(), [], dict[str, Tensor]()
    for step in range(steps):
        timed.begin()
        task.backward(rank, 0, step)
        timed.end()
        set_rate(optimizer, rate(step))
        rival.step()
        optimizer.zero_grad()
        ends.append(time.monotonic())
        if (step + 1) % every == 0:
            kept[str(step + 1)] = layout.gather(module)
    rival.finish()
    finished = time.monotonic()
    kept["final"] = layout.gather(module)
    save_file(kept, f"worker-{rank}.safetensors")
    found = {"began": began, "ends": ends, "finished": finished, "late": timed.late / timed.passes}
    _write(Path(f"worker-{rank}.json"), json.dumps(found))
    rival.close()


def _until_started(rank: int) -> None:
    _write(Path(f"ready-{rank}"), "")
    while not Path("go").exists():
        time.sleep(_POLL_SECONDS)


def _write(path: Path, text: str) -> None:
    """Write a file in one step, because another process waits for it."""
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    run(Spec.parse(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","))

"""One worker that trains two copies of a model in turn, step by step: one plain or under DDP, one prepared.

python -m deployment.overhead_process '{"address": ..., "model": "cifarnet", ...}'        alone or under torchrun
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import weightgrad as wg
from weightgrad.lab import models

SIZES = {"cifarnet": (3, 24), "mlp": (1, 28)}  # channels and side of the images
BLOCK = 10  # steps; a round of every strategy here fits into it
WARM = 2 * BLOCK


def stepper(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]]
) -> tuple[torch.optim.Optimizer, Callable[[], float]]:
    """An optimizer for the model, and a function that takes the next step and returns its seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    done = 0

    def step() -> float:
        nonlocal done
        images, labels = batches[done % len(batches)]
        done += 1
        began = time.perf_counter()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()  # as a prepared step does: gradients kept longer push the other copy out of the cache
        return time.perf_counter() - began

    return optimizer, step


def main() -> None:
    """Warm up, agree on the number of steps, take them in turn, and write the times."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    channels, side = SIZES[settings["model"]]
    site = wg.join(settings["address"], site="site-1", insecure=True)
    torch.manual_seed(site.group.rank)
    batches = [
        (torch.randn(settings["batch"], channels, side, side), torch.randint(10, (settings["batch"],)))
        for _ in range(4)
    ]
    plain, ours = (
        models.build(settings["model"], classes=10, channels=channels, size=side, seed=1, **settings["options"])
        for _ in range(2)
    )
    reference = plain if site.group.size == 1 else nn.parallel.DistributedDataParallel(plain)
    _, plain_step = stepper(reference, batches)
    optimizer, our_step = stepper(ours, batches)
    site.prepare(ours, optimizer, samples=settings["batch"] * site.group.size)
    before = [plain_step() + our_step() for _ in range(WARM)]
    wanted = settings["seconds"] / (sum(before[-BLOCK:]) / BLOCK)
    blocks = site.group.number_from_first(max(settings["blocks"], int(wanted) // BLOCK))
    waited = site._connection.waited if site._connection is not None else 0.0
    times = [(plain_step(), our_step()) for _ in range(blocks * BLOCK)]
    if site._connection is not None:
        found = {"times": times, "block": BLOCK, "waited": site._connection.waited - waited}
        found["parameters"] = sum(p.numel() for p in plain.parameters())
        Path(settings["out"]).write_text(json.dumps(found))
    site.leave()


if __name__ == "__main__":
    main()

"""One worker that trains two copies of a model in turn, step by step: as plain PyTorch or DDP, and prepared.

python field_overhead_child.py '{"address": ..., "model": "cifarnet", ...}'      alone or under torchrun
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
from weightgrad.train import models

SIZES = {"cifarnet": (3, 24), "mlp": (1, 28)}  # channels and side of the images
BLOCK = 10  # steps; a round of every row here fits into it
WARM = 2 * BLOCK


def stepper(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]]
) -> tuple[torch.optim.Optimizer, Callable[[], float]]:
    """An optimizer for the model, and a function that takes the next step and says its seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    done = 0

    def step() -> float:
        nonlocal done
        images, labels = batches[done % len(batches)]
        done += 1
        began = time.perf_counter()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()  # here, as a prepared step does: who keeps gradients longer makes the other's memory cold
        return time.perf_counter() - began

    return optimizer, step


def main() -> None:
    """Warm up, agree on how many, take turns, write the times."""
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    channels, side = SIZES[told["model"]]
    site = wg.join(told["address"], site="site-1", insecure=True)
    torch.manual_seed(site.lan.rank)
    batches = [
        (torch.randn(told["batch"], channels, side, side), torch.randint(10, (told["batch"],))) for _ in range(4)
    ]
    plain, ours = (
        models.build(told["model"], classes=10, channels=channels, size=side, seed=1, **told["options"])
        for _ in range(2)
    )
    rival = plain if site.lan.size == 1 else nn.parallel.DistributedDataParallel(plain)
    _, plain_step = stepper(rival, batches)
    optimizer, our_step = stepper(ours, batches)
    site.prepare(ours, optimizer, samples=told["batch"] * site.lan.size)
    before = [plain_step() + our_step() for _ in range(WARM)]
    wanted = told["seconds"] / (sum(before[-BLOCK:]) / BLOCK)
    blocks = site.lan.number_from_first(max(told["blocks"], int(wanted) // BLOCK))
    waited = site._wan.waited if site._wan is not None else 0.0
    times = [(plain_step(), our_step()) for _ in range(blocks * BLOCK)]
    if site._wan is not None:
        found = {"times": times, "block": BLOCK, "waited": site._wan.waited - waited}
        found["parameters"] = sum(p.numel() for p in plain.parameters())
        Path(told["out"]).write_text(json.dumps(found))
    site.leave()


if __name__ == "__main__":
    main()

"""One worker that trains two copies of a model in turn, step by step: one plain, under DDP or FSDP2, and one prepared.

python -m deployment.overhead_process '{"address": ..., "model": "cifarnet", ...}'        alone or under torchrun
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deployment.distance import pretend_distance
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import weightgrad as wg
from weightgrad.lab import models

SIZES = {"cifarnet": (3, 24), "mlp": (1, 28)}  # channels and side of the images
TOKENS, LENGTH = 256, 64  # of a GPT
BLOCK = 10  # steps
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}


def make_model(settings: dict[str, Any], ranks: int) -> nn.Module:
    """The model of the settings, sharded over the ranks if they say so; every call makes the same one."""
    name, options = settings["model"], settings["options"]
    if name == "gpt":
        model = models.build(name, classes=TOKENS, channels=1, size=LENGTH, seed=1, **options)
    else:
        channels, side = SIZES[name]
        model = models.build(name, classes=10, channels=channels, size=side, seed=1, **options)
    if settings["sharded"]:
        mesh = init_device_mesh("cpu", (ranks,))
        for block in getattr(model, "blocks", ()):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def make_batches(settings: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """A few random batches."""
    batch = settings["batch"]
    if settings["model"] == "gpt":
        return [(torch.randint(TOKENS, (batch, LENGTH)), torch.randint(TOKENS, (batch, LENGTH))) for _ in range(4)]
    channels, side = SIZES[settings["model"]]
    return [(torch.randn(batch, channels, side, side), torch.randint(10, (batch,))) for _ in range(4)]


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> Any:
    """A function that takes the next step and returns its seconds, and those of the processor in this thread."""
    done = 0

    def step() -> tuple[float, float]:
        nonlocal done
        inputs, labels = batches[done % len(batches)]
        done += 1
        began, busy = time.perf_counter(), time.thread_time()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()  # as a prepared step does: gradients kept longer push the other copy out of the cache
        return time.perf_counter() - began, time.thread_time() - busy

    return step


def main() -> None:
    """Warm up, agree on the number of steps, take them in turn, and write the times."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    pretend_distance()
    site = wg.join(settings["address"], site="site-1", insecure=True)
    batches = make_batches(settings)
    torch.manual_seed(site.group.rank)
    plain, ours = (make_model(settings, site.group.size) for _ in range(2))
    reference = plain
    if site.group.size > 1 and not settings["sharded"]:
        reference = nn.parallel.DistributedDataParallel(plain)
    make_optimizer = OPTIMIZERS[settings["optimizer"]]
    plain_step = stepper(reference, make_optimizer(plain.parameters()), batches)
    optimizer = make_optimizer(ours.parameters())
    our_step = stepper(ours, optimizer, batches)
    site.prepare(ours, optimizer, samples=settings["batch"] * site.group.size)
    training = site._training
    assert training is not None
    warm = settings["warm"]
    if settings["core"] is not None:  # this thread, and those that it starts from now on
        os.sched_setaffinity(0, {settings["core"]})
    before = [plain_step()[0] + our_step()[0] for _ in range(warm)]
    wanted = settings["seconds"] / (sum(before[-BLOCK:]) / len(before[-BLOCK:]))
    blocks = site.group.number_from_first(max(settings["blocks"], int(wanted) // BLOCK))
    waited, times, cpu, kinds = training.waited, [], [], []
    for _ in range(blocks * BLOCK):
        known = _progress(training.coordinator)
        plain_s, our_s = plain_step(), our_step()
        times.append((plain_s[0], our_s[0]))
        cpu.append((plain_s[1], our_s[1]))
        now = _progress(training.coordinator)
        kinds.append((now[0] != known[0], now[1] != known[1]))  # whether the step pushed, and whether it moved
    if site.group.first:
        found = {"times": times, "cpu": cpu, "kinds": kinds, "block": BLOCK, "waited": training.waited - waited}
        found["parameters"] = sum(p.numel() for p in plain.parameters())
        Path(settings["out"]).write_text(json.dumps(found))
    site.leave()


def _progress(coordinator: Any) -> tuple[int, int]:
    """The rounds that were pushed and the results that were applied, as rank 0 knows them."""
    return (0, 0) if coordinator is None else (coordinator.progress.pushed_round, coordinator.version)


if __name__ == "__main__":
    main()

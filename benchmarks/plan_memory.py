"""The memory of a training step as `weightgrad plan` counts it on fake tensors, beside what real steps allocate.

python benchmarks/plan_memory.py                    # 1 to 129 million parameters; five minutes on two cores
python benchmarks/plan_memory.py --sizes 355        # GPT-2 medium; 8 GB of memory
python benchmarks/plan_memory.py --sizes 1,10 --checkpointing

A process of its own takes two real steps, and `weightgrad/lab/bench/allocations.c` counts what it allocates: the most
at any time, less what was there before the model was made. Before that, a step of one small layer makes torch import
what it imports with the first optimizer (13 MB of Python). What the matrix library keeps for itself (MKL: 3.5 to 8 MB)
is counted, but not planned.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from weightgrad.core import optimizers
from weightgrad.lab import models
from weightgrad.lab.bench.allocations import Allocations, counted
from weightgrad.lab.models.gpt import Gpt
from weightgrad.lab.plan.model_cost import ModelCost, cost_of
from weightgrad.lab.plan.trained_module import checkpoint_blocks
from weightgrad.units import show_bytes

SIZES = {"1": (128, 4, 4, 4096), "10": (256, 8, 8, 8192), "50": (512, 12, 8, 20000), "124": (768, 12, 12, 50257)}
SIZES["355"] = (1024, 24, 16, 50257)
IMAGES = {"cifarnet": 32, "resnet110": 32, "vgg-a-32": 32, "resnet50": 64, "mlp": 28, "vgg-a": 64}  # and their sides
BATCH, CONTEXT = 4, 128
HEAD = "| model | parameters | optimizer | planned | allocated | error % |\n|---|---:|---|---:|---:|---:|"


def build(size: str) -> torch.nn.Module:
    """A model of images by its name, or a GPT; width, layers, heads and classes are those of the size."""
    if size in IMAGES:
        return models.build(size, classes=10, channels=3, size=IMAGES[size], seed=0)
    width, layers, heads, classes = SIZES[size]
    return Gpt(classes=classes, context=CONTEXT, width=width, layers=layers, heads=heads)


def batch_of(size: str) -> torch.Tensor:
    """A batch of it."""
    if size in IMAGES:
        return torch.zeros(8 * BATCH, 3, IMAGES[size], IMAGES[size])
    return torch.zeros(BATCH, CONTEXT, dtype=torch.int64)


def real_steps(size: str, optimizer: str, checkpointing: bool) -> None:
    """Two real steps, in a process whose allocations are counted."""
    torch.set_num_threads(1)
    first = torch.nn.Linear(8, 8)
    once = optimizers.build(optimizer, list(first.parameters()), {"lr": 1e-4})
    first(torch.zeros(2, 8)).sum().backward()
    once.step()
    print("ready", flush=True)
    sys.stdin.readline()
    model = build(size)
    if checkpointing:
        checkpoint_blocks(model)
    stepper = optimizers.build(optimizer, list(model.parameters()), {"lr": 1e-4})
    inputs = batch_of(size)
    labels = torch.zeros(len(inputs), dtype=torch.int64) if size in IMAGES else inputs
    for _ in range(2):
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        stepper.step()
        stepper.zero_grad()
    print("done", flush=True)
    sys.stdin.readline()


def allocated(size: str, optimizer: str, checkpointing: bool) -> int:
    """The most that two real steps allocate, in bytes."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, __file__, "--child", size, "--optimizer", optimizer]
        command += ["--checkpointing"] if checkpointing else []
        child = subprocess.Popen(
            command,
            env={**os.environ, **counted(Path(place))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "ready"
        counters = Allocations(Path(place), child.pid)
        before = counters.now
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline().strip() == "done"
        found = counters.peak - before
        child.communicate("\n")
        return found


def planned(size: str, optimizer: str, checkpointing: bool) -> ModelCost:
    """What the plan counts."""
    options, inputs = (optimizer, {"lr": 1e-4}), partial(batch_of, size)
    return cost_of(lambda: build(size), options, inputs=inputs, batch=BATCH, checkpointing=checkpointing)


def row(size: str, optimizer: str, checkpointing: bool) -> str:
    """One model as a row of the table."""
    cost = planned(size, optimizer, checkpointing)
    real = allocated(size, optimizer, checkpointing)
    error = 100 * (cost.peak_bytes / real - 1)
    counts = show_bytes(cost.peak_bytes)
    name = (size if size in IMAGES else "gpt") + (", checkpointing" if checkpointing else "")
    return f"| {name} | {cost.layout.numel / 1e6:.1f} M | {optimizer} | {counts} | {show_bytes(real)} | {error:+.1f} |"


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(["1", "10", "50", "124", *IMAGES]))
    parser.add_argument("--optimizers", default="sgd,adamw")
    parser.add_argument("--optimizer", default="adamw", help=argparse.SUPPRESS)
    parser.add_argument("--checkpointing", action="store_true", help="compute the activations of blocks again")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        return real_steps(options.child, options.optimizer, options.checkpointing)
    print(HEAD, flush=True)
    for size in options.sizes.split(","):
        for optimizer in options.optimizers.split(","):
            print(row(size, optimizer, options.checkpointing), flush=True)
    return None


if __name__ == "__main__":
    main()

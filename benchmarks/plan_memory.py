"""The memory of a training step as `weightgrad plan` counts it on fake tensors, beside what real steps allocate.

python benchmarks/plan_memory.py                    # 1 to 124 million parameters; two minutes on two cores
python benchmarks/plan_memory.py --sizes 355        # GPT-2 medium; 8 GB of memory

A process of its own takes two real steps, and `weightgrad/lab/bench/allocations.c` counts what it allocates: the most
at any time, less what was there before the model was made.
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
from weightgrad.lab.bench.allocations import Allocations, counted
from weightgrad.lab.models.gpt import Gpt
from weightgrad.lab.plan.model_cost import ModelCost, cost_of
from weightgrad.units import show_bytes

SIZES = {"1": (128, 4, 4, 4096), "10": (256, 8, 8, 8192), "50": (512, 12, 8, 20000), "124": (768, 12, 12, 50257)}
SIZES["355"] = (1024, 24, 16, 50257)
BATCH, CONTEXT = 4, 128
HEAD = "| parameters | optimizer | planned | allocated | error % |\n|---:|---|---:|---:|---:|"


def build(size: str) -> torch.nn.Module:
    """A GPT; width, layers, heads and classes are those of the size."""
    width, layers, heads, classes = SIZES[size]
    return Gpt(classes=classes, context=CONTEXT, width=width, layers=layers, heads=heads)


def real_steps(size: str, optimizer: str) -> None:
    """Two real steps, in a process whose allocations are counted."""
    torch.set_num_threads(1)
    _ = torch.ones(1, requires_grad=True).sum().backward()  # what torch allocates once
    print("ready", flush=True)
    sys.stdin.readline()
    model = build(size)
    stepper = optimizers.build(optimizer, list(model.parameters()), {"lr": 1e-4})
    tokens = torch.zeros(BATCH, CONTEXT, dtype=torch.int64)
    for _ in range(2):
        torch.nn.functional.cross_entropy(model(tokens), tokens).backward()
        stepper.step()
        stepper.zero_grad()
    print("done", flush=True)
    sys.stdin.readline()


def allocated(size: str, optimizer: str) -> int:
    """The most that two real steps allocate, in bytes."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, __file__, "--child", size, "--optimizer", optimizer]
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


def planned(size: str, optimizer: str) -> ModelCost:
    """What the plan counts."""
    inputs = partial(torch.zeros, BATCH, CONTEXT, dtype=torch.int64)
    return cost_of(lambda: build(size), (optimizer, {"lr": 1e-4}), inputs=inputs, batch=BATCH)


def row(size: str, optimizer: str) -> str:
    """One model as a row of the table."""
    cost = planned(size, optimizer)
    real = allocated(size, optimizer)
    error = 100 * (cost.peak_bytes / real - 1)
    counts = show_bytes(cost.peak_bytes)
    return f"| {cost.layout.numel / 1e6:.1f} M | {optimizer} | {counts} | {show_bytes(real)} | {error:+.1f} |"


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,10,50,124")
    parser.add_argument("--optimizers", default="sgd,adamw")
    parser.add_argument("--optimizer", default="adamw", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        return real_steps(options.child, options.optimizer)
    print(HEAD, flush=True)
    for size in options.sizes.split(","):
        for optimizer in options.optimizers.split(","):
            print(row(size, optimizer), flush=True)
    return None


if __name__ == "__main__":
    main()

"""Small recipes and whole runs of them, as real processes."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from weightgrad.train.recipe import Recipe

TINY = """
name: tiny
seed: 3
data: {{name: digits}}
model: {{name: lenet-digits}}
training:
  steps: {steps}
  batch: 32
  optimizer: {{name: {optimizer}}}
  schedule: cosine
  evaluate_every: 1000
server: {{name: hub}}
sites:
  - {{name: east, workers: {workers}}}
  - {{name: west, workers: {workers}}}
lan: {{bandwidth: 900 Mbit/s, delay: 0.1 ms}}
links:
  - {{between: [hub, east], bandwidth: 100 Mbit/s, delay: 5 ms}}
  - {{between: [hub, west], bandwidth: 50 Mbit/s, delay: 10 ms}}
compute: {{seconds_per_step: 0.01}}
strategy: {strategy}
"""

SGD = "sgd, lr: 0.05, momentum: 0.9"


def tiny(strategy: str, *, steps: int = 24, workers: int = 2, optimizer: str = SGD) -> Recipe:
    """Two sites on digits."""
    text = TINY.format(strategy=strategy, steps=steps, workers=workers, optimizer=optimizer)
    return Recipe.parse(text, "tiny.yaml")


def base_of(directory: Path) -> dict[str, torch.Tensor]:
    """The base that a run left, without what the simulator quantizes on top."""
    found = load_file(str(directory / "base.safetensors"))
    return {name: tensor for name, tensor in found.items() if not name.startswith("quantized.")}


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Every tensor, every bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name].view(torch.int32), b[name].view(torch.int32)), name

"""The processes whose memory is measured: a global server, and the workers of a site. Each writes what it found.

python field_memory_child.py serve RECIPE --listen ... (as weightgrad serve)
torchrun ... field_memory_child.py '{"address": ...}'
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch
from field_process import forget_peak, memory, peak_memory
from field_vectors import vectors
from torch import nn

import weightgrad as wg
from weightgrad.runtime.credentials import Credentials
from weightgrad.runtime.server import FieldServer, ServeOptions
from weightgrad.train import field
from weightgrad.train.recipe import Recipe
from weightgrad.wan.guard import Guard

LAYERS, BATCH = 4, 8


def serve() -> None:
    """Until all sites have finished."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", type=Path)
    for name in ("--listen", "--metrics"):
        parser.add_argument(name)
    for name in ("--credentials", "--state"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args(sys.argv[2:])
    options = ServeOptions(listen=given.listen, state=given.state, until_finished=True, guard=Guard())
    house = field.house(Recipe.load(given.recipe))
    server = FieldServer(house, options, Credentials.load(given.credentials, server=True))
    forget_peak()
    before = memory()
    server.run()
    assert server.core is not None
    model_bytes = 4 * server.core.base.layout.numel
    _write(given.recipe.parent / "server.json", before, vectors(server, least=model_bytes // 50))


def site(told: dict[str, str | int]) -> None:
    """A few plain steps, so that gradients and momentum are there; then prepared ones."""
    torch.set_num_threads(1)
    out = Path(str(told["out"]))
    own = wg.join(
        str(told["address"]),
        site="site-1",
        credentials=str(told["certificates"]),
        state=out / "site-state",
        checkpoint_every=5,
    )
    width = math.isqrt(int(told["numel"]) // LAYERS)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x = torch.randn(BATCH, width)

    def step() -> None:
        optimizer.zero_grad()
        (model(x) ** 2).mean().backward()
        optimizer.step()

    step()
    step()
    forget_peak()
    before = memory()  # with weights, gradients and momentum, as plain PyTorch has them
    own.prepare(model, optimizer)
    for _ in range(int(told["steps"])):
        step()
    theirs = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t))]
    held = vectors(own, theirs, least=4 * LAYERS * width**2 // 50)
    _write(out / f"rank-{own.lan.rank}.json", before, held)
    own.leave()


def _write(path: Path, before: int, held: dict[str, int]) -> None:
    path.write_text(json.dumps({"before": before, "peak": peak_memory(), "held": held}))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        site(json.loads(sys.argv[1]))

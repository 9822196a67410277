"""The processes whose memory is measured: a global server, and the workers of a site. Each writes a JSON file.

python -m deployment.memory_process serve RECIPE --listen ...        the options are those of `weightgrad serve`
torchrun ... -m deployment.memory_process '{"address": ...}'
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch
from deployment.held_memory import held_bytes
from deployment.server_process import forget_peak, memory, peak_memory
from torch import nn

import weightgrad as wg
from weightgrad.core.guard import Guard
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run import deployment
from weightgrad.runtime.security.credentials import Credentials
from weightgrad.runtime.server import GlobalServer, ServeOptions
from weightgrad.runtime.transport.grpc_server import GrpcServer

LAYERS, BATCH = 4, 8


def serve() -> None:
    """Serve until all sites have finished, then write `server.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", type=Path)
    for name in ("--listen", "--metrics"):
        parser.add_argument(name)
    for name in ("--credentials", "--state"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args(sys.argv[2:])
    options = ServeOptions(state=given.state, until_finished=True, guard=Guard())
    run_config = deployment.run_config(Recipe.load(given.recipe))
    credentials = Credentials.load(given.credentials, server=True)
    transport = GrpcServer(given.listen, credentials=credentials.for_server())
    server = GlobalServer(run_config, options, transport, credentials)
    forget_peak()
    before = memory()
    server.run()
    assert server.core is not None
    model_bytes = 4 * server.core.global_model.layout.numel
    _write(given.recipe.parent / "server.json", before, held_bytes(server, least=model_bytes // 50))


def site(settings: dict[str, str | int]) -> None:
    """Train two plain steps, so that gradients and momentum exist, then prepared ones; write `rank-RANK.json`."""
    torch.set_num_threads(1)
    out = Path(str(settings["out"]))
    own = wg.join(
        str(settings["address"]),
        site="site-1",
        credentials=str(settings["certificates"]),
        state=out / "site-state",
        checkpoint_every=5,
    )
    width = math.isqrt(int(settings["numel"]) // LAYERS)
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
    for _ in range(int(settings["steps"])):
        step()
    user_tensors = [
        *model.parameters(),
        *(t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)),
    ]
    held = held_bytes(own, user_tensors, least=4 * LAYERS * width**2 // 50)
    _write(out / f"rank-{own.group.rank}.json", before, held)
    own.leave()


def _write(path: Path, before: int, held: dict[str, int]) -> None:
    path.write_text(json.dumps({"before": before, "peak": peak_memory(), "held": held}))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        site(json.loads(sys.argv[1]))

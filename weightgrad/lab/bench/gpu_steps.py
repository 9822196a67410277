"""The steps of a rank on a GPU: plain, and then as a rank of a site. One of the processes that `gpu_check.py` starts.

A GPT is trained on random tokens: the values do not matter, the work does. Every rank times the same steps twice, first
by itself, then after `prepare`, and the first rank writes what it found as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

from weightgrad.lab.models.gpt import Gpt
from weightgrad.runtime.join import join
from weightgrad.runtime.session import Site

SIZES: dict[str, dict[str, int]] = {
    "124m": {"classes": 50257, "context": 1024, "width": 768, "layers": 12, "heads": 12},
    "tiny": {"classes": 64, "context": 16, "width": 32, "layers": 2, "heads": 2},
}
"""GPT-2's smallest size, whose output layer is not tied here, and one for trying the check itself."""


@dataclass(frozen=True)
class Steps:
    """What a rank has measured, in seconds a step.

    Attributes:
        parameters: Of the whole model.
        ranks: Of the site.
        plain: The median without a site.
        between: The median of steps between rounds.
        rounds: The median of steps with a round.
        digest: Of the global model at the end.
    """

    parameters: int
    ranks: int
    plain: float
    between: float
    rounds: float
    digest: str


def measure(
    site: Site,
    device: torch.device,
    *,
    size: str = "tiny",
    batch: int = 2,
    steps: int = 12,
    every: int = 4,
    shards: bool = False,
    move: Callable[[nn.Module], nn.Module] | None = None,
) -> Steps:
    """Train a few plain steps, then a few as a rank of a site, and leave it.

    Args:
        site: A site that is not prepared.
        device: Where the model is.
        size: One of SIZES.
        batch: Sequences of a step.
        steps: Steps of each kind; a multiple of `every`.
        every: Steps from round to round, as the server's strategy has it.
        shards: Whether FSDP2 shards the model over the ranks of the site.
        move: Brings a module to the device; None is `Module.to`.
    """
    torch.manual_seed(1)
    model: nn.Module = Gpt(**SIZES[size])
    model = model.to(device) if move is None else move(model)
    if shards:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (site.group.size,))
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = torch.randint(SIZES[size]["classes"], (batch, SIZES[size]["context"])).to(device)
    optimizer = AdamW(model.parameters(), lr=1e-4)
    plain = [_step(model, optimizer, tokens) for _ in range(steps)]
    model, optimizer = site.prepare(model, optimizer)
    joined = [_step(model, optimizer, tokens) for _ in range(steps)]
    site.leave()
    return Steps(
        parameters=parameters,
        ranks=site.group.size,
        plain=statistics.median(plain[1:]),
        between=statistics.median(one for place, one in enumerate(joined) if (place + 1) % every and place),
        rounds=statistics.median(joined[every - 1 :: every]),
        digest=site.digest(),
    )


def _step(model: nn.Module, optimizer: AdamW, tokens: Tensor) -> float:
    """The seconds of one step. The loss is read last, behind everything that the stream was given."""
    began = time.perf_counter()
    loss = functional.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    float(loss.detach())
    return time.perf_counter() - began


def main(argv: list[str] | None = None) -> None:
    """One rank of one site."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True)
    parser.add_argument("--site", required=True)
    parser.add_argument("--device", required=True, help="such as cuda:0; under torchrun the rank picks its own")
    parser.add_argument("--size", choices=SIZES, default="124m")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--shards", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args: Any = parser.parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))
        torch.cuda.set_device(device)
    site = join(args.server, site=args.site, insecure=True, timeout=600.0)
    found = measure(
        site,
        device,
        size=args.size,
        batch=args.batch,
        steps=args.steps,
        every=args.every,
        shards=args.shards,
    )
    if site.group.first:
        args.out.write_text(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()

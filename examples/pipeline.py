"""Pipeline parallelism: the first worker of a site has the first layers, the second worker has the others.

torchrun --standalone --nproc-per-node 2 examples/pipeline.py --server 127.0.0.1:7443 --site east --insecure

Each worker sends and receives its own layers. They keep the names that they have in the whole network, so the other
site may be sharded in another way (fsdp2.py, hsdp.py, tensor_parallel.py).
"""

from __future__ import annotations

import argparse
import sys
import zlib

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import weightgrad as wg
from weightgrad.lab.data import datasets


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="127.0.0.1:7443", help="HOST:PORT of `weightgrad serve`")
    parser.add_argument("--site", required=True, help="a name in the server's recipe, such as east")
    parser.add_argument("--credentials", help="directory of certificates, made by `weightgrad certs init`")
    parser.add_argument("--insecure", action="store_true", help="no certificates; for a server on this machine")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="images per site and step")
    return parser.parse_args()


class First(nn.Module):
    """The first layers of the network that the other examples of sharding train as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(64, 256)
        self.narrow = nn.Linear(256, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, images: Tensor) -> Tensor:
        """Features (n, 64) of images (n, 1, 8, 8)."""
        x = images.flatten(1)
        features: Tensor = self.norm(x + self.narrow(torch.relu(self.widen(x))))
        return features


class Last(nn.Module):
    """The last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 10)

    def forward(self, features: Tensor) -> Tensor:
        """Scores (n, 10) of features (n, 64)."""
        scores: Tensor = self.last(features)
        return scores


def main() -> None:
    """Train as one worker of a site. Leaving the `with` block sends the residual and leaves the run."""
    args = arguments()
    torch.set_num_threads(1)
    with wg.join(args.server, site=args.site, credentials=args.credentials, insecure=args.insecure) as site:
        if (count := site.group.size) != 2:
            sys.exit("this network has two stages: torchrun --nproc-per-node 2")

        torch.manual_seed(0)
        stages: list[nn.Module] = [First(), Last()]  # both are made, so that the seed gives the whole network
        module = stages[rank := site.group.rank]
        optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
        module, optimizer = site.prepare(module, optimizer, samples=args.batch, stages=True)
        stage = PipelineStage(module, rank, count, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.CrossEntropyLoss())

        data = datasets.load("digits")
        draw = torch.Generator().manual_seed(zlib.crc32(args.site.encode()))  # all workers draw the same images
        while site.steps < args.steps:
            images, labels = data.train(torch.randint(data.train_count, (args.batch,), generator=draw))
            losses: list[Tensor] = []
            if rank == 0:
                schedule.step(images)
            else:
                schedule.step(target=labels, losses=losses)
            optimizer.step()
            optimizer.zero_grad()
            if losses and site.steps % 10 == 0:
                print(f"{args.site}: step {site.steps}, loss {torch.stack(losses).mean().item():.3f}", flush=True)

    word = site.digest()
    if site.group.first:
        print(f"global model {word}", flush=True)


if __name__ == "__main__":
    main()

"""Pipeline parallelism: the first worker of a site has the first layers, the second worker has the others.

torchrun --standalone --nproc-per-node 2 examples/pipeline.py --server 127.0.0.1:7443 --site east --insecure
"""

from __future__ import annotations

import argparse
import sys
import zlib

import torch
import torch.distributed as dist
import xxhash
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


def stages() -> list[nn.Module]:
    """The two stages of a network for digits."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU())
    second = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    return [first, second]


def digest(stage: nn.Module) -> str:
    """The fingerprint of all stages' parameters that the server logs after each round. Call it on all workers."""
    own = torch.cat([parameter.detach().flatten() for parameter in stage.parameters()])
    every: list[Tensor | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return xxhash.xxh3_64_hexdigest(torch.cat([part for part in every if part is not None]).numpy().tobytes())


def main() -> None:
    """Train as one worker of a site. Leaving the `with` block sends the residual and leaves the run."""
    args = arguments()
    torch.set_num_threads(1)
    with wg.join(args.server, site=args.site, credentials=args.credentials, insecure=args.insecure) as site:
        rank, count = site.group.rank, site.group.size
        if count != 2:
            sys.exit("this network has two stages: torchrun --nproc-per-node 2")

        module = stages()[rank]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
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

    word = digest(module)
    if site.group.first:
        print(f"global model {word}", flush=True)


if __name__ == "__main__":
    main()

"""Model parallelism by paths: the branches of two Inception blocks, two on each worker of a site.

torchrun --standalone --nproc-per-node 2 examples/model_parallel_branches.py --site east --insecure

The paths of a block see the same maps, not each other: workers exchange where the paths meet, once a block. Of the last
layer a path has what multiplies its own maps; scores are the sum over paths. One worker alone computes the same.
"""

from __future__ import annotations

import argparse
import zlib

import torch
import torch.distributed as dist
from torch import Tensor, nn

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


class Gather(torch.autograd.Function):
    """The channels of all workers, side by side; back to each flows the sum of what all make of its channels."""

    @staticmethod
    def forward(_: torch.autograd.function.FunctionCtx, own: Tensor) -> Tensor:  # noqa: D102
        dist.all_gather(parts := [torch.empty_like(own) for _ in range(dist.get_world_size())], own)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(_: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:  # noqa: D102
        dist.all_reduce(total := gradient.clone(memory_format=torch.contiguous_format))
        return total.chunk(dist.get_world_size(), 1)[dist.get_rank()]


def block(inputs: int) -> list[nn.Module]:
    """The paths of an Inception block: 1 x 1; 3 x 3 and 5 x 5, each behind 1 x 1; pooling before 1 x 1."""
    return [
        nn.Sequential(nn.Conv2d(inputs, 8, 1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(inputs, 8, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(inputs, 4, 1), nn.ReLU(), nn.Conv2d(4, 12, 5, padding=2), nn.ReLU()),
        nn.Sequential(nn.MaxPool2d(3, 1, padding=1), nn.Conv2d(inputs, 12, 1), nn.ReLU()),
    ]


class Net(nn.Module):
    """This worker's paths, as many maps on each of two workers. A parameter has its name in the whole network."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        last = [nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * n, 10)) for n in (8, 16, 12, 12)]
        made = list(zip(block(1), block(48), last, strict=True))  # all, so that the seed gives the whole network
        self.paths = nn.ModuleDict({str(p): nn.ModuleList(made[p]) for p in range(4) if p * ranks // 4 == rank})
        self.gather = Gather.apply if ranks > 1 else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Scores (n, 10) of images (n, 1, 8, 8), the same on every worker."""
        x = self.gather(torch.cat([first(images) for first, _, _ in self.paths.values()], 1))
        parts = self.gather(torch.cat([last(second(x)) for _, second, last in self.paths.values()], 1))
        return parts.view(len(images), -1, 10).sum(1)


def main() -> None:
    """Train as one worker of a site. Leaving the `with` block sends the residual and leaves the run."""
    args = arguments()
    torch.set_num_threads(1)
    with wg.join(args.server, site=args.site, credentials=args.credentials, insecure=args.insecure) as site:
        torch.manual_seed(0)
        model = Net(rank=site.group.rank, ranks=site.group.size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model, optimizer = site.prepare(model, optimizer, samples=args.batch, stages=True)
        data = datasets.load("digits")
        draw = torch.Generator().manual_seed(zlib.crc32(args.site.encode()))  # all workers see the same images
        while site.steps < args.steps:
            images, labels = data.train(torch.randint(data.train_count, (args.batch,), generator=draw))
            loss = nn.functional.cross_entropy(model(images), labels)
            (loss / site.group.size).backward()  # every worker has this loss, and Gather sums over the workers
            optimizer.step()
            optimizer.zero_grad()
            if site.group.first and site.steps % 5 == 0:
                print(f"{args.site}: step {site.steps}, loss {loss.item():.5f}", flush=True)
    word = site.digest()
    if site.group.first:
        print(f"global model {word}", flush=True)


if __name__ == "__main__":
    main()

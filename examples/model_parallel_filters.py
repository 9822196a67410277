"""Model parallelism by filters: the two columns of the original AlexNet, one on each worker of a site.

torchrun --standalone --nproc-per-node 2 examples/model_parallel_filters.py --site east --insecure

A column has half of the filters of each convolution and half of the neurons of each dense layer. As in the original,
the third convolution and the dense layers see both columns: there workers exchange. One alone computes the same.
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


def column() -> nn.ModuleList:
    """AlexNet's layers of one column for images of 8 x 8, with fewer filters, cut where the columns meet."""
    return nn.ModuleList([
        nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                      nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(32, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(),
                      nn.Conv2d(24, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        nn.Sequential(nn.Linear(128, 32), nn.ReLU()), nn.Sequential(nn.Linear(64, 32), nn.ReLU()), nn.Linear(64, 5),
    ])  # fmt: skip


class Net(nn.Module):
    """This worker's columns. A parameter has the name that it has in the whole network."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        made = {str(place): column() for place in range(2)}  # both, so that the seed gives the whole network
        self.columns = nn.ModuleDict({place: made[place] for place in list(made)[rank::ranks]})
        self.gather = Gather.apply if ranks > 1 else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Scores (n, 10) of images (n, 1, 8, 8), the same on every worker."""
        for layers in zip(*self.columns.values(), strict=True):
            images = self.gather(torch.cat([layer(images) for layer in layers], 1))
        return images


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

"""Tensor parallelism: the workers of a site share the columns of one layer and the rows of the next.

torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py --server 127.0.0.1:7443 --site east --insecure

A layer that is cut by columns is redistributed to rows when a round takes or gives weights, and only then. The other
site may be sharded in another way (fsdp2.py, hsdp.py, pipeline.py).
"""

from __future__ import annotations

import argparse
import zlib

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

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


class Net(nn.Module):
    """A wide layer between two narrow ones, for digits. The other examples of sharding train the same network."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(64, 256)
        self.narrow = nn.Linear(256, 64)
        self.norm = nn.LayerNorm(64)
        self.last = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Scores (n, 10) of images (n, 1, 8, 8)."""
        x = images.flatten(1)
        scores: Tensor = self.last(self.norm(x + self.narrow(torch.relu(self.widen(x)))))
        return scores


def main() -> None:
    """Train as one worker of a site. Leaving the `with` block sends the residual and leaves the run."""
    args = arguments()
    torch.set_num_threads(1)
    with wg.join(args.server, site=args.site, credentials=args.credentials, insecure=args.insecure) as site:
        mesh = init_device_mesh("cpu", (site.group.size,))  # on GPUs "cuda"

        torch.manual_seed(0)
        plan = {"widen": ColwiseParallel(), "narrow": RowwiseParallel()}  # the norm and the last layer are replicated
        model = parallelize_module(Net(), mesh, plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        model, optimizer = site.prepare(model, optimizer, samples=args.batch)

        data = datasets.load("digits")
        draw = torch.Generator().manual_seed(zlib.crc32(args.site.encode()))  # all workers see the same images
        while site.steps < args.steps:
            images, labels = data.train(torch.randint(data.train_count, (args.batch,), generator=draw))
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if site.group.first and site.steps % 10 == 0:
                print(f"{args.site}: step {site.steps}, loss {loss.item():.3f}", flush=True)

    word = site.digest()
    if site.group.first:
        print(f"global model {word}", flush=True)


if __name__ == "__main__":
    main()

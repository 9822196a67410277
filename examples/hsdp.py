"""HSDP: the workers of a site form groups; a group shards the parameters as in FSDP2, and the groups are replicas.

torchrun --standalone --nproc-per-node 4 examples/hsdp.py --server 127.0.0.1:7443 --site east --insecure

Workers that have the same shard divide the work of a round among them. The other site may be sharded in another way.
"""

from __future__ import annotations

import argparse
import zlib

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
        groups = 2
        shape = (groups, site.group.size // groups)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))  # on GPUs "cuda"

        torch.manual_seed(0)
        model = Net()
        for layer in (model.widen, model.narrow):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        model, optimizer = site.prepare(model, optimizer, samples=args.batch)

        data = datasets.load("digits")
        draw = torch.Generator().manual_seed(zlib.crc32(f"{args.site} {site.group.rank}".encode()))
        while site.steps < args.steps:
            images, labels = data.train(
                torch.randint(data.train_count, (args.batch // site.group.size,), generator=draw)
            )
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()  # leaves every worker its shard of the mean gradient of all workers
            optimizer.step()
            optimizer.zero_grad()
            if site.group.first and site.steps % 10 == 0:
                print(f"{args.site}: step {site.steps}, loss {loss.item():.3f}", flush=True)

    word = site.digest()
    if site.group.first:
        print(f"global model {word}", flush=True)


if __name__ == "__main__":
    main()

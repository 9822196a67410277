"""FSDP2: every worker of a site keeps a shard of each parameter, and `fully_shard` gathers the shards for compute.

torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --server 127.0.0.1:7443 --site east --insecure
"""

from __future__ import annotations

import argparse
import zlib

import torch
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

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
    parser.add_argument("--batch", type=int, default=32, help="images per worker and step")
    return parser.parse_args()


def build() -> nn.Sequential:
    """A network of three layers for digits."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def digest(model: nn.Module) -> str:
    """The fingerprint of the parameters that the server logs after each round. Call it on all workers."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    flat = torch.cat([parameter.detach().flatten() for parameter in whole])
    return xxhash.xxh3_64_hexdigest(flat.numpy().tobytes())


def main() -> None:
    """Train as one worker of a site. Leaving the `with` block sends the residual and leaves the run."""
    args = arguments()
    torch.set_num_threads(1)
    with wg.join(args.server, site=args.site, credentials=args.credentials, insecure=args.insecure) as site:
        mesh = init_device_mesh("cpu", (site.group.size,))  # on GPUs "cuda"

        model = build()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        model, optimizer = site.prepare(model, optimizer, samples=args.batch * site.group.size)

        data = datasets.load("digits")
        draw = torch.Generator().manual_seed(zlib.crc32(f"{args.site} {site.group.rank}".encode()))
        while site.steps < args.steps:
            images, labels = data.train(torch.randint(data.train_count, (args.batch,), generator=draw))
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()  # FSDP2 leaves every worker its shard of the mean gradient
            optimizer.step()
            optimizer.zero_grad()
            if site.group.first and site.steps % 10 == 0:
                print(f"{args.site}: step {site.steps}, loss {loss.item():.3f}", flush=True)

    word = digest(model)
    if site.group.first:
        print(f"global model {word}", flush=True)


if __name__ == "__main__":
    main()

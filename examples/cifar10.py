"""CIFAR-10 with the usual loop: a DataLoader, gradient clipping and a learning-rate schedule.

torchrun --standalone --nproc-per-node 2 examples/cifar10.py --server 127.0.0.1:7443 --site east --insecure
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weightgrad as wg
from weightgrad.lab import models
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
    parser.add_argument("--data", choices=("cifar10", "digits"), default="cifar10", help="digits needs no download")
    return parser.parse_args()


def forever(loader: DataLoader[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """The batches of one epoch after another."""
    while True:
        yield from loader


def main() -> None:
    """Train as one worker of a site. Leaving the `with` block sends the residual and leaves the run."""
    args = arguments()
    torch.set_num_threads(1)
    with wg.join(args.server, site=args.site, credentials=args.credentials, insecure=args.insecure) as site:
        # Every worker shuffles with its own seed. In a deployment a site would read its own images from its own disk.
        data = datasets.load(args.data)
        assert isinstance(data, datasets.Dataset)
        images = data.train_images.float() / 255 - 0.5 if args.data == "cifar10" else data.train_images
        order = torch.Generator().manual_seed(zlib.crc32(f"{args.site} {site.group.rank}".encode()))
        loader = DataLoader(
            TensorDataset(images, data.train_labels), args.batch, shuffle=True, drop_last=True, generator=order
        )

        model = models.build("cifarnet", classes=data.classes, channels=data.channels, size=data.size, seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        model, optimizer = site.prepare(model, optimizer, samples=args.batch * site.group.size)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)

        loss_fn, batches = nn.CrossEntropyLoss(), forever(loader)
        while site.steps < args.steps:
            x, y = next(batches)
            loss = loss_fn(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if site.group.first and site.steps % 10 == 0:
                print(f"{args.site}: step {site.steps}, loss {loss.item():.3f}", flush=True)

    with torch.no_grad():
        test = data.test_images[:1000].float() / 255 - 0.5 if args.data == "cifar10" else data.test_images
        right = (model(test).argmax(1) == data.test_labels[: len(test)]).float().mean()
    word = site.digest()
    if site.group.first:
        print(f"{args.site}: {right.item():.1%} of the test images\nglobal model {word}", flush=True)


if __name__ == "__main__":
    main()

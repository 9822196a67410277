"""A small GPT: AdamW, bfloat16 autocast, and gradients accumulated over a few batches.

torchrun --standalone --nproc-per-node 2 examples/gpt.py --server 127.0.0.1:7443 --site east --insecure
"""

from __future__ import annotations

import argparse
import zlib

import torch
from torch import Tensor, nn

import weightgrad as wg
from weightgrad.errors import DataError
from weightgrad.lab.data import datasets
from weightgrad.lab.models.gpt import Gpt

CONTEXT = 64


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="127.0.0.1:7443", help="HOST:PORT of `weightgrad serve`")
    parser.add_argument("--site", required=True, help="a name in the server's recipe, such as east")
    parser.add_argument("--credentials", help="directory of certificates, made by `weightgrad certs init`")
    parser.add_argument("--insecure", action="store_true", help="no certificates; for a server on this machine")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="windows of text per worker and backward pass")
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes per step")
    parser.add_argument("--data", choices=("sotu", "synthetic"), default="sotu", help="`weightgrad data fetch sotu`")
    return parser.parse_args()


def text(name: str) -> tuple[Tensor, int]:
    """Tokens, and how many different ones there are: the speeches if they were fetched, otherwise square numbers."""
    try:
        if name == "sotu":
            found = datasets.load("sotu")
            assert isinstance(found, datasets.TextDataset)
            return found.train_tokens, found.classes
    except DataError as error:
        print(f"{error}\ntraining on square numbers instead", flush=True)
    written = " ".join(str(number * number) for number in range(20_000))
    return torch.tensor(["0123456789 ".index(letter) for letter in written]), 11


def main() -> None:
    """Train as one worker of a site. Leaving the `with` block sends the residual and leaves the run."""
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with wg.join(args.server, site=args.site, credentials=args.credentials, insecure=args.insecure) as site:
        tokens, classes = text(args.data)
        places = torch.arange(CONTEXT + 1)
        draw = torch.Generator().manual_seed(zlib.crc32(f"{args.site} {site.group.rank}".encode()))

        model = Gpt(classes=classes, context=CONTEXT, width=64, layers=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
        model, optimizer = site.prepare(model, optimizer, samples=args.batch * args.accumulate * site.group.size)

        while site.steps < args.steps:
            total = 0.0
            for _ in range(args.accumulate):  # optimizer.step() exchanges what all passes left in .grad
                starts = torch.randint(len(tokens) - CONTEXT, (args.batch, 1), generator=draw)
                window = tokens[starts + places]
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    scores = model(window[:, :-1])
                loss = nn.functional.cross_entropy(scores.float(), window[:, 1:]) / args.accumulate
                loss.backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            if site.group.first and site.steps % 10 == 0:
                print(f"{args.site}: step {site.steps}, loss {total:.3f}", flush=True)

    word = site.digest()
    if site.group.first:
        print(f"global model {word}", flush=True)


if __name__ == "__main__":
    main()

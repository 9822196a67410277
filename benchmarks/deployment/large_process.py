"""A site that trains a GPT with tied embeddings on random tokens, beside a plain loop that shows what it costs.

python -m deployment.large_process '{"address": ...}'        writes SITE.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from deployment.memory_process import OPTIMIZERS, Gauge
from torch import nn
from torch.nn import functional

import weightgrad as wg
from weightgrad.lab.models.gpt import Gpt

PLAIN_STEPS = 2


def make_model(*, vocabulary: int, context: int, width: int, layers: int, heads: int) -> nn.Module:
    """GPT-2's shape: the embedding is the last layer, too."""
    torch.manual_seed(0)
    model = Gpt(classes=vocabulary, size=context, width=width, layers=layers, heads=heads)
    model.last.weight = model.tokens.weight
    return model


def main() -> None:
    """Take plain steps that change nothing, join, train, leave, and write what it took."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    model = make_model(**settings["shape"])
    optimizer = OPTIMIZERS[settings["optimizer"]](model.parameters())
    shape, batch = settings["shape"], settings["batch"]
    draw = torch.Generator().manual_seed(settings["number"])

    def step() -> float:
        began = time.monotonic()
        tokens = torch.randint(shape["vocabulary"], (batch, shape["context"] + 1), generator=draw)
        functional.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.monotonic() - began

    gauge = Gauge(None, Path(settings["counters"]))
    # With a rate of zero the weights stay as they are, so that no site must be sent those of the other.
    usual = [(group["lr"], group.get("weight_decay", 0.0)) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    plain_seconds = [step() for _ in range(PLAIN_STEPS)]
    for group, (rate, decay) in zip(optimizer.param_groups, usual, strict=True):
        group["lr"], group["weight_decay"] = rate, decay
    found = {"plain": gauge.now(), "plain_peak": gauge.next_phase(), "plain_seconds": min(plain_seconds)}
    began = time.monotonic()
    site = wg.join(
        settings["address"], site=settings["site"], credentials=settings["certificates"], timeout=settings["timeout"]
    )
    site.prepare(model, optimizer, samples=batch)
    found |= {"join_seconds": time.monotonic() - began, "join_peak": gauge.next_phase()}
    training = site._training
    assert training is not None
    waited, up, down = training.waited, training.up_bytes, training.down_bytes
    began, seconds, kept = time.monotonic(), [], []
    for _ in range(settings["steps"]):
        seconds.append(step())
        kept.append(gauge.now())
    found |= {"train_seconds": time.monotonic() - began, "train_peak": gauge.next_phase(), "kept": kept}
    found |= {"waited": training.waited - waited, "up": training.up_bytes - up, "down": training.down_bytes - down}
    found |= {"parameters": sum(p.numel() for p in model.parameters()), "seconds": seconds}
    assert training.coordinator is not None
    found |= {"rounds": training.coordinator.progress.pushed_round, "version": training.coordinator.version}
    began = time.monotonic()
    site.leave()
    found |= {"leave_seconds": time.monotonic() - began, "leave_peak": gauge.next_phase(), "digest": site.digest()}
    Path(settings["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

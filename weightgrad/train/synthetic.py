"""A made-up task that needs no data: images drawn by one random network, named by another.

Six hidden numbers z ~ N(0, 1) decide both. A random two-layer network turns z into a smooth 16x16 image, to
which noise is added; a random teacher turns z into ten scores, offset until every class is equally likely,
and the largest is the label. Of three candidates one is kept, where the teacher was surest of its class: a
task with an answer. Everything follows from the seed: another seed is another task.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

TRAIN, TEST, SIDE, CLASSES = 6000, 1000, 16, 10
_HIDDEN, _WIDTH, _NOISE = 6, 64, 0.1
_CANDIDATES = 3
_BALANCING_ROUNDS = 60


def make(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images (6000, 1, 16, 16) and labels, test images (1000, 1, 16, 16) and labels."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def layer(inputs: Tensor, width: int) -> Tensor:
        return inputs @ normal(inputs.shape[1], width) / math.sqrt(inputs.shape[1])

    hidden = normal(_CANDIDATES * (TRAIN + TEST), _HIDDEN)
    scores = layer(torch.tanh(layer(hidden, _WIDTH)), CLASSES)
    for _ in range(_BALANCING_ROUNDS):
        share = torch.bincount(scores.argmax(1), minlength=CLASSES) / len(scores)
        scores -= 0.5 * (share - 1 / CLASSES)
    first, second = scores.topk(2).values.T
    surest = (first - second).argsort(descending=True, stable=True)
    named = scores[surest].argmax(1)
    kept = torch.cat([surest[named == label][: (TRAIN + TEST) // CLASSES] for label in range(CLASSES)])
    kept = kept[torch.randperm(TRAIN + TEST, generator=generator)]
    labels = scores[kept].argmax(1)
    coarse = layer(torch.tanh(1.5 * layer(hidden[kept], _WIDTH)), 36).view(-1, 1, 6, 6)
    images = functional.interpolate(coarse, SIDE, mode="bilinear", align_corners=True)
    images = images / images.std() + _NOISE * normal(*images.shape)
    return images[:TRAIN], labels[:TRAIN], images[TRAIN:], labels[TRAIN:]

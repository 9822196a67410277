"""Data sets that need no download: `digits` and `synthetic`.

`digits` are scikit-learn's handwritten digits (UCI, Kaynak & Alpaydin, 1998): 1,797 images of 8 by 8 pixels inside
the wheel, 600 of them for testing.

`synthetic` is a made-up task: images drawn by one random network and labelled by another. Six hidden numbers
z ~ N(0, 1) decide both. A random two-layer network turns z into a smooth 16x16 image, to which noise is added; a
random teacher turns z into ten scores, offset until every class is equally likely, and the largest score is the label.
Of three candidates the one is kept of whose class the teacher is most certain, so that the task can be learnt.
Another seed is another task.
"""

from __future__ import annotations

import gzip
import importlib.util
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from weightgrad.errors import DataError

Split = tuple[Tensor, Tensor, Tensor, Tensor]  # training images and labels, test images and labels

DIGITS_TEST_IMAGES = 600


def digits(seed: int = 0) -> Split:
    """Images (n, 1, 8, 8) with values from 0 to 1, and labels from 0 to 9, in an order that the seed decides."""
    pixels, labels = _read_digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images = (pixels.float() / 16).view(-1, 1, 8, 8)[order]
    labels = labels.long()[order]
    cut = len(order) - DIGITS_TEST_IMAGES
    return images[:cut], labels[:cut], images[cut:], labels[cut:]


def _read_digits() -> tuple[Tensor, Tensor]:
    """Pixels and labels from the wheel's own file: importing scikit-learn takes longer than a short training."""
    found = importlib.util.find_spec("sklearn")
    if found is None:
        raise DataError("the data set digits is a file of scikit-learn, which is missing; pip install scikit-learn")
    assert found.origin is not None
    with gzip.open(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as lines:
        table = torch.from_numpy(np.loadtxt(lines, delimiter=","))
    return table[:, :-1], table[:, -1]


TRAIN, TEST, SIDE, CLASSES = 6000, 1000, 16, 10
_HIDDEN, _WIDTH, _NOISE = 6, 64, 0.1
_CANDIDATES = 3
_BALANCING_ROUNDS = 60


def synthetic(seed: int = 0) -> Split:
    """Training images (6000, 1, 16, 16) and labels, and test images (1000, 1, 16, 16) and labels."""
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

"""Handwritten digits, 8 by 8 pixels, and a small convolutional network that reads them.

The images are scikit-learn's `digits` (UCI, Kaynak & Alpaydin, 1998): 1,797 of them, inside the
wheel, so nothing is downloaded. A third is kept for testing. The network is LeNet-5's shape (LeCun
et al., 1998) made for 8 by 8 pixels, with ReLU and largest-value pooling: 105,226 parameters.
Everything that is random follows from a seed.
"""

from __future__ import annotations

import gzip
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from weightgrad.errors import WeightGradError

TEST_IMAGES = 600


def require(module: str, package: str) -> None:
    """Say how to install what the demonstration needs and a plain installation has not."""
    if importlib.util.find_spec(module) is None:
        raise WeightGradError(f"{package} is not installed; pip install 'weightgrad[demo]'")


@dataclass(frozen=True)
class Digits:
    """Images (n, 1, 8, 8) with values from 0 to 1, and labels (n,) from 0 to 9."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load(seed: int = 0) -> Digits:
    """All images in an order that the seed decides; the last TEST_IMAGES of them are for testing."""
    pixels, labels = _read()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images = (pixels.float() / 16).view(-1, 1, 8, 8)[order]
    answers = labels.long()[order]
    cut = len(order) - TEST_IMAGES
    return Digits(images[:cut], answers[:cut], images[cut:], answers[cut:])


def _read() -> tuple[Tensor, Tensor]:
    """Pixels and labels, from the wheel's own file: importing scikit-learn takes longer than the training does."""
    require("sklearn", "scikit-learn")
    found = importlib.util.find_spec("sklearn")
    assert found is not None
    assert found.origin is not None
    with gzip.open(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as lines:
        table = torch.from_numpy(np.loadtxt(lines, delimiter=","))
    return table[:, :-1], table[:, -1]


def batches(digits: Digits, *, steps: int, workers: int, batch: int, seed: int = 0) -> Tensor:
    """Which training images to use: (steps, workers, batch) indices. A worker has a part of the data to itself."""
    share = len(digits.train_labels) // workers
    generator = torch.Generator().manual_seed(seed)
    mine = torch.randint(share, (steps, workers, batch), generator=generator)
    return mine + share * torch.arange(workers).view(1, workers, 1)


class LeNet(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
            self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
            self.linear1 = nn.Linear(32 * 4 * 4, 192)
            self.linear2 = nn.Linear(192, 10)
            for tensor in self.parameters():
                if tensor.dim() > 1:
                    nn.init.kaiming_normal_(tensor, nonlinearity="relu")
                else:
                    nn.init.zeros_(tensor)

    def forward(self, images: Tensor) -> Tensor:
        """Scores (n, 10) of images (n, 1, 8, 8)."""
        x = torch.max_pool2d(torch.relu(self.conv1(images)), 2)
        x = torch.relu(self.conv2(x)).flatten(1)
        x = torch.relu(self.linear1(x))
        scores: Tensor = self.linear2(x)
        return scores


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """Fraction of the test images that are read correctly."""
    guesses = model(digits.test_images).argmax(1)
    return float((guesses == digits.test_labels).double().mean())

"""SqueezeNet 1.0 (Iandola et al., 2016): fire modules, no dense layer. 1,248,424 parameters with 1000 classes.

A fire module squeezes to few channels by 1x1 and expands by 1x1 and 3x3 side by side. Below 64x64 the stem
is 3x3 with stride 1, otherwise nothing would be left to look at. Dropout before the last convolution is an
option and off (see alexnet.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weightgrad.lab.models.initialization import at_least, he


class Fire(nn.Module):
    """Squeeze, then expand two ways."""

    def __init__(self, inputs: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeeze, 1)
        self.expand1 = nn.Conv2d(squeeze, expand, 1)
        self.expand3 = nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) to (n, 2 · expand, h, w)."""
        x = torch.relu(self.squeeze(x))
        return torch.cat([self.expand1(x), self.expand3(x)], 1).relu_()


class SqueezeNet(nn.Module):
    """A stem, eight fire modules, and a convolution whose mean is the score."""

    def __init__(self, *, classes: int, channels: int, size: int, dropout: float = 0.0) -> None:
        super().__init__()
        at_least("squeezenet", size, 28)
        stem = nn.Conv2d(channels, 96, 7, stride=2) if size >= 64 else nn.Conv2d(channels, 96, 3, padding=1)
        self.features = nn.Sequential(
            stem, nn.ReLU(True), nn.MaxPool2d(3, 2, ceil_mode=True),
            Fire(96, 16, 64), Fire(128, 16, 64), Fire(128, 32, 128), nn.MaxPool2d(3, 2, ceil_mode=True),
            Fire(256, 32, 128), Fire(256, 48, 192), Fire(384, 48, 192), Fire(384, 64, 256),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            Fire(512, 64, 256), nn.Dropout(dropout),
        )  # fmt: skip
        self.last = nn.Conv2d(512, classes, 1)
        he(self, last=self.last)

    def forward(self, images: Tensor) -> Tensor:
        """Scores (n, classes) of images (n, channels, size, size)."""
        scores: Tensor = torch.relu(self.last(self.features(images))).mean((2, 3))
        return scores

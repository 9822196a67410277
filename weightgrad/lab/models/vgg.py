"""VGG-A (Simonyan & Zisserman, 2015): eight 3x3 convolutions, five pools, three linear layers, no batch norm.

132,863,336 parameters for 224x224 and 1000 classes. For 32x32 the classifier has 512 units instead of
4096: 9,750,922 with 10 classes. Dropout is an option and off (see alexnet.py).
"""

from __future__ import annotations

from torch import Tensor, nn

from weightgrad.lab.models.initialization import at_least, he

_WIDTHS = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)  # 0 is a pool


def _features(channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in _WIDTHS:
        if width:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(True)]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def _classifier(inputs: int, width: int, classes: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(inputs, width), nn.ReLU(True), nn.Dropout(dropout),
        nn.Linear(width, width), nn.ReLU(True), nn.Dropout(dropout),
        nn.Linear(width, classes),
    )  # fmt: skip


class Vgg(nn.Module):
    """VGG-A with the classifier of 4096."""

    def __init__(self, *, classes: int, channels: int, size: int, dropout: float = 0.0) -> None:
        super().__init__()
        at_least("vgg-a", size, 32)
        self.features = _features(channels)
        self.pool = nn.AdaptiveAvgPool2d(7)
        self.classifier = _classifier(512 * 7 * 7, 4096, classes, dropout)
        he(self, last=self.classifier[-1])

    def forward(self, images: Tensor) -> Tensor:
        """Scores (n, classes) of images (n, channels, size, size)."""
        scores: Tensor = self.classifier(self.pool(self.features(images)))
        return scores


class Vgg32(nn.Module):
    """VGG-A with a classifier of 512, for small images."""

    def __init__(self, *, classes: int, channels: int, size: int, dropout: float = 0.0) -> None:
        super().__init__()
        at_least("vgg-a-32", size, 32)
        self.features = _features(channels)
        self.classifier = _classifier(512 * (size // 32) ** 2, 512, classes, dropout)
        he(self, last=self.classifier[-1])

    def forward(self, images: Tensor) -> Tensor:
        """Scores (n, classes) of images (n, channels, size, size)."""
        scores: Tensor = self.classifier(self.features(images))
        return scores

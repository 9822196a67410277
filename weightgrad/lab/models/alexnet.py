"""AlexNet in one column (Krizhevsky, 2014), for 224x224 and, reduced, for 32x32.

The large one has 61,100,840 parameters with 1000 classes. The small one keeps the five convolutions with
the widths, shortens the strides and has one dense layer: 2,472,266 parameters with 10 classes. Dropout is
an option and off: it would draw from the global random numbers, and short runs are better without.
"""

from __future__ import annotations

from torch import Tensor, nn

from weightgrad.lab.models.initialization import at_least, he


def _body(first: nn.Conv2d, pool: int) -> nn.Sequential:
    return nn.Sequential(
        first, nn.ReLU(True), nn.MaxPool2d(pool, 2),
        nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(True), nn.MaxPool2d(pool, 2),
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(True),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(True),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(pool, 2),
    )  # fmt: skip


class AlexNet(nn.Module):
    """Five convolutions, three linear layers."""

    def __init__(self, *, classes: int, channels: int, size: int, dropout: float = 0.0) -> None:
        super().__init__()
        at_least("alexnet", size, 63)
        self.features = _body(nn.Conv2d(channels, 64, 11, stride=4, padding=2), pool=3)
        self.pool = nn.AdaptiveAvgPool2d(6)
        last = nn.Linear(4096, classes)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(dropout), nn.Linear(256 * 6 * 6, 4096), nn.ReLU(True),
            nn.Dropout(dropout), nn.Linear(4096, 4096), nn.ReLU(True),
            last,
        )  # fmt: skip
        he(self, last=last)

    def forward(self, images: Tensor) -> Tensor:
        """Scores (n, classes) of images (n, channels, size, size)."""
        scores: Tensor = self.classifier(self.pool(self.features(images)))
        return scores


class AlexNet32(nn.Module):
    """The five convolutions with strides for small images, one linear layer."""

    def __init__(self, *, classes: int, channels: int, size: int) -> None:
        super().__init__()
        at_least("alexnet32", size, 29)
        side = (size + 3) // 4 // 8  # stride 4 of a kernel of 11 padded by 5, then three pools
        self.features = _body(nn.Conv2d(channels, 64, 11, stride=4, padding=5), pool=2)
        self.classifier = nn.Linear(256 * side * side, classes)
        he(self, last=self.classifier)

    def forward(self, images: Tensor) -> Tensor:
        """Scores (n, classes) of images (n, channels, size, size)."""
        scores: Tensor = self.classifier(self.features(images).flatten(1))
        return scores

"""Dense layers only: by default three hidden ones of 4096, much to send for little to compute."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from weightgrad.lab.models.initialization import he


class Mlp(nn.Module):
    """`depth` hidden layers of `width` with ReLU."""

    def __init__(self, *, classes: int, channels: int, size: int, width: int = 4096, depth: int = 3) -> None:
        super().__init__()
        widths = [channels * size * size, *[width] * depth]
        hidden = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        last = nn.Linear(widths[-1], classes)
        self.layers = nn.Sequential(nn.Flatten(), *hidden, last)
        he(self, last=last)

    def forward(self, images: Tensor) -> Tensor:
        """Scores (n, classes) of images (n, channels, size, size)."""
        scores: Tensor = self.layers(images)
        return scores

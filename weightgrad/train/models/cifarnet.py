"""CifarNet: the network of the old TensorFlow tutorial, which the WeightGrad paper trains.

24 x 24 crops; convolution 5x5x64, max-pool 3/2, response norm, convolution 5x5x64, response norm,
max-pool 3/2, dense 384, 192, classes. 1,068,298 parameters. The tutorial's initial weights (truncated
normal, std 0.05 and 0.04) are replaced by torch's own, which learn faster than He's here (200 steps of 128
with learning rate 0.05 and momentum 0.9: loss 1.68 against 1.73); its weight decay on the dense layers is left
to the optimizer.

Written for one processor core. Memory formats are chosen layer by layer, by measurement: the first
convolution, pooling and response norm are fastest channels-last, the second convolution is not. ReLU after
a max-pool equals ReLU before it and has a quarter of the work.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from weightgrad.train.models.initial import at_least
from weightgrad.train.models.response_norm import ResponseNorm


class CifarNet(nn.Module):
    """Two convolutions with response norm, three dense layers."""

    def __init__(self, *, classes: int, channels: int, size: int) -> None:
        super().__init__()
        at_least("cifarnet", size, 8)
        self.conv1 = nn.Conv2d(channels, 64, 5, padding=2)
        self.conv2 = nn.Conv2d(64, 64, 5, padding=2)
        self.norm = ResponseNorm(64)
        self.linear1 = nn.Linear(64 * (size // 4) ** 2, 384)
        self.linear2 = nn.Linear(384, 192)
        self.linear3 = nn.Linear(192, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Scores (n, classes) of images (n, channels, size, size)."""
        x = self.conv1(images.contiguous(memory_format=torch.channels_last))
        x = self.norm(functional.max_pool2d(x, 3, 2, ceil_mode=True).relu_())
        x = self.conv2(x.contiguous()).relu_()
        x = self.norm(x.contiguous(memory_format=torch.channels_last))
        x = functional.max_pool2d(x, 3, 2, ceil_mode=True)
        x = x.permute(0, 2, 3, 1).flatten(1)  # height, width, channel: no copy
        x = torch.relu(self.linear2(torch.relu(self.linear1(x))))
        scores: Tensor = self.linear3(x)
        return scores

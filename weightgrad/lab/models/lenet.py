"""LeNet-5 (LeCun et al., 1998) as it is built today: ReLU, largest-value pooling, full connections.

6 and 16 kernels of 5x5, then 120, 84 and the classes: 61,706 parameters for one channel, 28x28 (padded
by 2, as the paper's 32x32 frame) or 32x32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weightgrad.lab.models.initialization import at_least, he


class LeNet(nn.Module):
    """Two convolutions, three linear layers."""

    def __init__(self, *, classes: int, channels: int, size: int) -> None:
        super().__init__()
        at_least("lenet", size, 12)
        padding = 2 if size < 32 else 0
        side = ((size + 2 * padding - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=padding)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.linear1 = nn.Linear(16 * side * side, 120)
        self.linear2 = nn.Linear(120, 84)
        self.linear3 = nn.Linear(84, classes)
        he(self, last=self.linear3)

    def forward(self, images: Tensor) -> Tensor:
        """Scores (n, classes) of images (n, channels, size, size)."""
        x = torch.relu(torch.max_pool2d(self.conv1(images), 2))
        x = torch.relu(torch.max_pool2d(self.conv2(x), 2)).flatten(1)
        x = torch.relu(self.linear2(torch.relu(self.linear1(x))))
        scores: Tensor = self.linear3(x)
        return scores


class LeNetDigits(nn.Module):
    """LeNet-5's shape for 8x8 digits: two convolutions and two linear layers, 105,226 parameters."""

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

"""Residual networks (He et al., 2016): 20 and 110 layers for 32x32, 50 layers for 224x224.

The thin ones have 6n + 2 layers of 16, 32 and 64 channels, and shortcuts without parameters (option A:
every second pixel, missing channels zero): 269,722 and 1,727,962 parameters with 10 classes. ResNet-50 has
bottlenecks and projections: 25,557,032 with 1000 classes; below 64x64 its stem is 3x3 with stride 1 and no
pool. Batch norm keeps running statistics in buffers, which are no parameters: who averages models must
think of them. In ResNet-50 the last norm of a block starts at zero, so a block starts as the identity (Goyal et
al., 2017); the thin ones learn faster in their first steps without that, and with torch's last layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from weightgrad.errors import WeightGradError
from weightgrad.lab.models.initialization import at_least, he


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


class Basic(nn.Module):
    """Two 3x3 convolutions beside a shortcut without parameters."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = _conv(outputs, outputs, 3), nn.BatchNorm2d(outputs)
        self.stride, self.missing = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) to (n, outputs, h / stride, w / stride)."""
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        if self.missing:
            x = x[:, :, :: self.stride, :: self.stride]
            x = functional.pad(x, (0, 0, 0, 0, self.missing // 2, self.missing - self.missing // 2))
        return torch.relu(x + y)


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up, beside a shortcut that is a projection where the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.norm1 = _conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = _conv(width, outputs, 1), nn.BatchNorm2d(outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        )
        nn.init.zeros_(self.norm3.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) to (n, 4 · width, h / stride, w / stride)."""
        y = torch.relu(self.norm1(self.conv1(x)))
        y = torch.relu(self.norm2(self.conv2(y)))
        return torch.relu(self.shortcut(x) + self.norm3(self.conv3(y)))


class ThinResNet(nn.Module):
    """6n + 2 layers for small images."""

    def __init__(self, *, classes: int, channels: int, size: int, depth: int) -> None:
        super().__init__()
        at_least(f"resnet{depth}", size, 4)
        if depth < 8 or (depth - 2) % 6:
            raise WeightGradError(f"a thin ResNet has 6n + 2 layers, not {depth}")
        layers: list[nn.Module] = [_conv(channels, 16, 3), nn.BatchNorm2d(16), nn.ReLU(True)]
        inputs = 16
        for width in (16, 32, 64):
            for _ in range((depth - 2) // 6):
                layers.append(Basic(inputs, width, stride=1 if inputs == width else 2))
                inputs = width
        self.layers = nn.Sequential(*layers)
        he(self.layers)
        self.last = nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Scores (n, classes) of images (n, channels, size, size)."""
        scores: Tensor = self.last(self.layers(images).mean((2, 3)))
        return scores


class ResNet50(nn.Module):
    """Sixteen bottlenecks."""

    def __init__(self, *, classes: int, channels: int, size: int) -> None:
        super().__init__()
        at_least("resnet50", size, 8)
        layers: list[nn.Module] = [_conv(channels, 64, 7, 2) if size >= 64 else _conv(channels, 64, 3)]
        layers += [nn.BatchNorm2d(64), nn.ReLU(True)]
        if size >= 64:
            layers.append(nn.MaxPool2d(3, 2, padding=1))
        inputs = 64
        for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for block in range(blocks):
                layers.append(Bottleneck(inputs, width, stride=2 if block == 0 and width > 64 else 1))
                inputs = 4 * width
        self.layers = nn.Sequential(*layers)
        self.last = nn.Linear(inputs, classes)
        he(self, last=self.last)

    def forward(self, images: Tensor) -> Tensor:
        """Scores (n, classes) of images (n, channels, size, size)."""
        scores: Tensor = self.last(self.layers(images).mean((2, 3)))
        return scores

"""CifarNet: the network of the old TensorFlow tutorial, which the WeightGrad paper trains.

24 x 24 crops; convolution 5x5x64, max-pool 3/2, response norm, convolution 5x5x64, response norm,
max-pool 3/2, dense 384, 192, classes. 1,068,298 parameters. The tutorial's initial weights (truncated
normal, std 0.05 and 0.04) are replaced by torch's own, which learn faster than He's here (200 steps of 128
with learning rate 0.05 and momentum 0.9: loss 1.68 against 1.73); its weight decay on the dense layers is left
to the optimizer.

Written for one processor core. Memory formats are chosen layer by layer, by measurement: the first
convolution, pooling and response norm are fastest channels-last, the second convolution is not. ReLU after
a max-pool equals ReLU before it and has a quarter of the work.

Local response normalisation across channels, at the speed of a matrix product.

y = x / (1 + a · Σ x²)^¾, the sum over the channels at most `radius` away (Krizhevsky et al., 2012; the
TensorFlow tutorial's CifarNet has radius 4, a = 0.001 / 9). torch sums by a three-dimensional pooling and
raises to a power, which takes as long as both convolutions of CifarNet; here the sum is a product with a
band matrix, the power two square roots, and the gradient is written out:

    s = 1 + x² B,   y = x s^-¾,   dx = g s^-¾ - 2 · ¾ · x ((g y / s) B),   B = a where channels are near.

Equal to `nn.LocalResponseNorm(2 * radius + 1, alpha=a * (2 * radius + 1), beta=0.75, k=1)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from weightgrad.lab.models.initialization import at_least


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, band: Tensor) -> Tensor:
        n, channels, height, width = images.shape
        x = images.permute(0, 2, 3, 1).reshape(-1, channels)
        root = torch.addmm(band.new_ones(()), x * x, band).rsqrt_()  # s^-½
        scale = root.sqrt().mul_(root)  # s^-¾
        y = x * scale
        ctx.save_for_backward(x, root, scale, band)
        return y.view(n, height, width, channels).permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x, root, scale, band = ctx.saved_tensors
        n, channels, height, width = gradient.shape
        direct = gradient.permute(0, 2, 3, 1).reshape(-1, channels) * scale
        through = (direct * x).mul_(root).mul_(root) @ band
        direct.addcmul_(x, through, value=-1.5)
        return direct.view(n, height, width, channels).permute(0, 3, 1, 2), None


class ResponseNorm(nn.Module):
    """Divide each value by what its channel neighbours have; fastest on channels-last images."""

    band: Tensor

    def __init__(self, channels: int, *, radius: int = 4, alpha: float = 0.001 / 9) -> None:
        super().__init__()
        place = torch.arange(channels)
        near = (place[:, None] - place[None, :]).abs() <= radius
        self.register_buffer("band", alpha * near.float(), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Images (n, channels, h, w), normalised."""
        made: Tensor = _Normalise.apply(images, self.band)  # type: ignore[no-untyped-call]
        return made


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

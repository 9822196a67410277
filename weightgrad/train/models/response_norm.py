"""Local response normalisation across channels, at the speed of a matrix product.

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

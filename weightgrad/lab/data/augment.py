"""From stored images to the input of a network: crops and flips drawn from a key, then fixed scaling.

CifarNet takes 24x24 images: a random crop and flip in training, the middle in testing, and each image standardised to
mean 0 and deviation 1, as in the TensorFlow tutorial. The tutorial's random brightness and contrast are left out,
because the standardisation undoes both except for rounding. Other networks take CIFAR-10 at 32x32, padded by 4, cropped
and flipped (He et al., 2016), normalised by the mean and deviation of each channel. MNIST and Fashion-MNIST are only
normalised; digits, the synthetic task and text are used as stored.

Folders are treated like ImageNet in Krizhevsky et al. (2012): the shorter side is resized to 8/7 of what the network
reads (256 for 224) and the middle cropped to a square, before they come here; then a random crop and flip in training,
the middle in testing, and ImageNet's mean and deviation. Their random changes of colour are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from weightgrad.errors import DataError

CIFARNET_SIZE = 24

_SCALES: dict[
    str, tuple[tuple[float, ...], tuple[float, ...]] | None
] = {  # mean and deviation of each channel, of values 0 to 1
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "digits": None,
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "folder": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "mnist": ((0.1307,), (0.3081,)),
    "sotu": None,
    "synthetic": None,
}
_PHOTOGRAPHS = ("cifar10", "folder")


def margin(model_name: str, size: int) -> int:
    """How many pixels more than `size` the images of a folder have, so that a random crop has room.

    CifarNet crops in any case, so its images have none.
    """
    return 0 if model_name == "cifarnet" else size // 7


@dataclass(frozen=True)
class Pipeline:
    """The processing of images between data set and network; a pure function of its arguments."""

    scale: tuple[Tensor, Tensor] | None  # factor and offset of each channel, (c, 1, 1)
    standardise: bool  # each image by itself, instead of `scale`
    crop: int | None  # side of the crop
    pad: bool  # whether to pad by an eighth on each side before a random crop
    augment: bool

    def size(self, size: int) -> int:
        """The side of the output for images of this side.

        Raises:
            DataError: The images are too small.
        """
        if self.crop is not None and size < self.crop:
            side = f"{self.crop}x{self.crop}"
            raise DataError(f"a crop of {side} needs images of {side} or larger, not {size}x{size}")
        return size if self.crop is None else self.crop

    def train(self, images: Tensor, key: int) -> Tensor:
        """Training images (n, c, h, w), cropped and flipped as the key decides, as float32."""
        if not self.augment:
            return self.test(images)
        n, _, height, _ = images.shape
        side = self.size(height)
        if self.pad:
            images = functional.pad(images, (height // 8,) * 4)
        generator = torch.Generator().manual_seed(key)
        span = images.shape[2] - side + 1
        y, x = torch.randint(span, (2, n), generator=generator)
        flip = torch.randint(2, (n,), generator=generator, dtype=torch.bool)
        return self._scaled(_cut(images, y, x, flip, side))

    def test(self, images: Tensor) -> Tensor:
        """Test images (n, c, h, w), cropped to the middle, as float32; text passes through."""
        if self.crop is not None:
            side = self.size(images.shape[2])
            top = (images.shape[2] - side) // 2
            images = images[:, :, top : top + side, top : top + side]
        return self._scaled(images)

    def _scaled(self, images: Tensor) -> Tensor:
        if self.standardise:
            rows = images.float().flatten(1)
            deviation, mean = torch.std_mean(rows, 1, correction=0, keepdim=True)
            rows = (rows - mean) / deviation.clamp_min_(rows.shape[1] ** -0.5)
            return rows.view(images.shape)
        if self.scale is None:
            return images
        factor, offset = self.scale
        return images.float().mul_(factor).add_(offset)


def _cut(images: Tensor, y: Tensor, x: Tensor, flip: Tensor, side: int) -> Tensor:
    n, channels, height, width = images.shape
    across = torch.arange(side)
    columns = torch.where(flip[:, None], side - 1 - across, across) + x[:, None]  # (n, side)
    rows = across + y[:, None]
    places = (rows[:, :, None] * width + columns[:, None, :]).view(n, 1, side * side)
    flat = images.reshape(n, channels, height * width)
    return flat.gather(2, places.expand(n, channels, side * side)).view(n, channels, side, side)


def pipeline(dataset_name: str, model_name: str, augment: bool = True, *, crop: int | None = None) -> Pipeline:
    """The pipeline for a data set and a network.

    Args:
        dataset_name: The data set.
        model_name: The network.
        augment: Whether training images are cropped and flipped at random.
        crop: The side of the crop; None: all of the image, and for CifarNet 24.

    Raises:
        DataError: There is no such data set.
    """
    if dataset_name not in _SCALES:
        raise DataError(f"no pipeline for data set {dataset_name!r}; there are {', '.join(_SCALES)}")
    photographs = dataset_name in _PHOTOGRAPHS
    cifarnet = photographs and model_name == "cifarnet"
    scale = None
    if (known := _SCALES[dataset_name]) is not None and not cifarnet:
        mean, deviation = (torch.tensor(values).view(-1, 1, 1) for values in known)
        scale = (1 / (255 * deviation), -mean / deviation)
    crop = CIFARNET_SIZE if cifarnet else crop
    return Pipeline(
        scale=scale,
        standardise=cifarnet,
        crop=crop,
        pad=crop is None,
        augment=augment and photographs,
    )

"""Reads and decodes image files in threads, ahead of the training that uses them.

An image is a pure function of its file and the side asked for: it is converted to RGB, its shorter side resized to
`side`, and its middle cropped. So neither the number of threads nor what was read ahead changes a bit; both only decide
who waits for whom. Pillow releases the interpreter while it decodes and resizes, so threads are enough, and images need
not be sent from one process to another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weightgrad.errors import DataError

Pixels = npt.NDArray[np.uint8]  # (side, side, 3)


def read_image(path: Path, side: int) -> Pixels:
    """Decode one image, resized and cropped to a square.

    Args:
        path: A file that Pillow can read.
        side: The side of the square in pixels.

    Returns:
        Its pixels (side, side, 3), red, green and blue.

    Raises:
        DataError: Pillow is not installed, or the file cannot be read as an image.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise DataError("reading images needs pillow; pip install 'weightgrad[images]'") from None
    try:
        with Image.open(path) as image:
            image.draft("RGB", (2 * side, 2 * side))  # a large JPEG is decoded at an eighth to a half of its size
            fitted = ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.BILINEAR)
            return np.asarray(fitted)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as an image ({error}); repair or remove it") from error


class ImageReader:
    """The images of a list of files, by their place in the list.

    Args:
        paths: The files.
        side: The side to which images are resized and cropped.
        threads: Threads that decode; 0 decodes when an image is asked for.
        ahead: Images that may wait decoded, in all; the oldest are dropped beyond that and decoded again if needed.
    """

    def __init__(self, paths: Sequence[Path], side: int, *, threads: int, ahead: int) -> None:
        self.paths = tuple(paths)
        self.side = side
        self._ahead = ahead
        self._pool = ThreadPoolExecutor(threads, "decode") if threads else None
        self._waiting: OrderedDict[int, Future[Pixels]] = OrderedDict()

    def prefetch(self, indices: Tensor) -> None:
        """Start to decode images that will be asked for soon; returns at once."""
        self._start(indices.tolist())
        while len(self._waiting) > self._ahead:
            self._waiting.popitem(last=False)[1].cancel()

    def _start(self, indices: Sequence[int]) -> None:
        if self._pool is None:
            return
        for index in indices:
            if index not in self._waiting:
                self._waiting[index] = self._pool.submit(read_image, self.paths[index], self.side)

    def read(self, indices: Tensor) -> Tensor:
        """The images (n, 3, side, side) uint8 of these places, in their order.

        Raises:
            DataError: A file cannot be read.
        """
        wanted = indices.tolist()
        made = np.empty((len(wanted), self.side, self.side, 3), np.uint8)
        if self._pool is None:
            for row, index in zip(made, wanted, strict=True):
                row[:] = read_image(self.paths[index], self.side)
        else:
            self._start(wanted)
            coming = {index: self._waiting.pop(index) for index in dict.fromkeys(wanted)}
            for row, index in zip(made, wanted, strict=True):
                row[:] = coming[index].result()
        return torch.from_numpy(made).permute(0, 3, 1, 2).contiguous()

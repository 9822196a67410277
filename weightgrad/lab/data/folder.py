"""The user's own images: DIR/train/CLASS/*.png and DIR/test/CLASS/*.png (or jpg), one folder for each class.

With sites: DIR/SITE/train/CLASS/*; the test images of all sites are put together, and each training image keeps its
site. An image is converted to RGB, its shorter side resized to `size`, and its middle cropped; all images are kept in
memory (3 · size² bytes each). Folders of the same name are the same class.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from weightgrad.errors import DataError

SIZE = 32
_ENDINGS = {".png", ".jpg", ".jpeg"}


@dataclass(frozen=True)
class Folder:
    """The images of a directory. Training images are in an order that the seed decides."""

    class_names: tuple[str, ...]
    site_names: tuple[str, ...]  # empty without sites
    train_images: Tensor  # (n, 3, size, size) uint8
    train_labels: Tensor
    site_ids: Tensor | None
    test_images: Tensor
    test_labels: Tensor


def load(directory: Path, *, size: int = SIZE, seed: int = 0) -> Folder:
    """Read every image below a directory.

    Raises:
        DataError: The directory is not laid out as described, or an image cannot be read.
    """
    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory; wanted one with train/CLASS/*.png and test/CLASS/*.png")
    if (directory / "train").is_dir():
        sites = []
        roots = [directory]
    else:
        sites = sorted(d.name for d in directory.iterdir() if (d / "train").is_dir())
        roots = [directory / site for site in sites]
    if not roots:
        raise DataError(f"{directory} has neither train/CLASS/ nor SITE/train/CLASS/; make one of them")
    train = [(path, site) for site, root in enumerate(roots) for path in _files(root / "train")]
    test = [path for root in roots for path in _files(root / "test")]
    for part, found in (("train", train), ("test", test)):
        if not found:
            raise DataError(f"no .png or .jpg in {directory}/{'SITE/' if sites else ''}{part}/CLASS/; put some there")
    classes = sorted({path.parent.name for path, _ in train})
    if strange := sorted({path.parent.name for path in test} - set(classes)):
        raise DataError(f"classes {', '.join(strange)} are in test but not in train of {directory}; add or remove them")
    number = {name: i for i, name in enumerate(classes)}
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
    train = [train[i] for i in order]
    return Folder(
        class_names=tuple(classes),
        site_names=tuple(sites),
        train_images=_read([path for path, _ in train], size),
        train_labels=torch.tensor([number[path.parent.name] for path, _ in train]),
        site_ids=torch.tensor([site for _, site in train]) if sites else None,
        test_images=_read(test, size),
        test_labels=torch.tensor([number[path.parent.name] for path in test]),
    )


def _files(part: Path) -> list[Path]:
    return sorted(p for p in part.glob("*/*") if p.suffix.lower() in _ENDINGS and p.is_file())


def _read(paths: list[Path], size: int) -> Tensor:
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise DataError("reading images needs pillow; pip install 'weightgrad[demo]'") from None
    made = np.empty((len(paths), size, size, 3), np.uint8)
    for row, path in zip(made, paths, strict=True):
        try:
            with Image.open(path) as image:
                row[:] = np.asarray(ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BILINEAR))
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"{path} cannot be read as an image ({error}); repair or remove it") from error
    return torch.from_numpy(made).permute(0, 3, 1, 2).contiguous()

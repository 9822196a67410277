"""The user's own images: DIR/train/CLASS/*.png and DIR/test/CLASS/*.png (or jpg), one folder for each class.

With sites: DIR/SITE/train/CLASS/*; the test images of all sites are put together, and each training image keeps its
site. Folders of the same name are the same class. Only the names of the files are kept in memory: images are read and
decoded by threads while training goes on (image_reader.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from weightgrad.errors import DataError
from weightgrad.lab.data.image_reader import ImageReader

SIZE = 32
THREADS = 2
_ENDINGS = {".png", ".jpg", ".jpeg"}
_AHEAD_BYTES = 2**28  # of decoded images that wait for their step
_TOP5_CLASSES = 6


@dataclass(frozen=True)
class Folder:
    """The image files of a directory. Training images are in an order that the seed decides."""

    class_names: tuple[str, ...]
    site_names: tuple[str, ...]  # empty without sites
    train_paths: tuple[Path, ...]
    train_labels: Tensor
    site_ids: Tensor | None
    test_paths: tuple[Path, ...]
    test_labels: Tensor


def find(directory: Path, *, seed: int = 0) -> Folder:
    """Find every image below a directory; none is opened.

    Raises:
        DataError: The directory is not laid out as described.
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
        train_paths=tuple(path for path, _ in train),
        train_labels=torch.tensor([number[path.parent.name] for path, _ in train]),
        site_ids=torch.tensor([site for _, site in train]) if sites else None,
        test_paths=tuple(test),
        test_labels=torch.tensor([number[path.parent.name] for path in test]),
    )


def _files(part: Path) -> list[Path]:
    return sorted(p for p in part.glob("*/*") if p.suffix.lower() in _ENDINGS and p.is_file())


class FolderDataset:
    """The images of a folder as a data set: read from disk when they are used, or a little before.

    Args:
        found: The files.
        size: The side of the images (n, 3, size, size) that `train` and `test` return.
        threads: Threads that read and decode; 0 does it in the training thread.
        limit: Use only so many training images; None means all.
    """

    name = "folder"
    channels = 3

    def __init__(self, found: Folder, *, size: int = SIZE, threads: int = THREADS, limit: int | None = None) -> None:
        if size < 1:
            raise DataError(f"images of {size}x{size} pixels; give a size of 1 or more")
        self.class_names = found.class_names
        self.site_names = found.site_names
        self.site_ids = None if found.site_ids is None else found.site_ids[:limit]
        self.size = size
        self.train_labels = found.train_labels[:limit]
        self.test_labels = found.test_labels
        ahead = max(1, _AHEAD_BYTES // (3 * size * size))
        self._train = ImageReader(found.train_paths[:limit], size, threads=threads, ahead=ahead)
        self._test = ImageReader(found.test_paths, size, threads=threads, ahead=ahead)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def has_top5(self) -> bool:
        """Whether the top-5 accuracy is reported: with five classes or fewer it would always be 1."""
        return self.classes >= _TOP5_CLASSES

    @property
    def train_count(self) -> int:
        """Number of training images."""
        return len(self.train_labels)

    @property
    def test_count(self) -> int:
        """Number of test images."""
        return len(self.test_labels)

    @property
    def strata(self) -> Tensor:
        """The labels: what a skewed sharding distributes unevenly."""
        return self.train_labels

    def train(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Training images and labels of these indices.

        Raises:
            DataError: An image cannot be read.
        """
        return self._train.read(indices), self.train_labels[indices]

    def test(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Test images and labels of these indices.

        Raises:
            DataError: An image cannot be read.
        """
        return self._test.read(indices), self.test_labels[indices]

    def prefetch_train(self, indices: Tensor) -> None:
        """Start to decode training images that are used next."""
        self._train.prefetch(indices)

    def prefetch_test(self, indices: Tensor) -> None:
        """Start to decode test images that are used next."""
        self._test.prefetch(indices)

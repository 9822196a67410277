"""Data sets by name: images or text, with training data and test data.

`digits` and `synthetic` need no download; `mnist`, `fashion-mnist`, `cifar10` and `sotu` are downloaded by
`weightgrad data fetch`. These are whole in memory. `folder` is the user's own images, which stay on disk (folder.py). A
data set returns samples by their indices: which samples a worker uses is decided in shards.py, and how they are
augmented in augment.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from weightgrad.errors import DataError
from weightgrad.lab.data import builtin, folder
from weightgrad.lab.data.folder import FolderDataset
from weightgrad.lab.data.sources import FILES

NAMES = ("cifar10", "digits", "fashion-mnist", "folder", "mnist", "sotu", "synthetic")
CONTEXT = 128
_TEXT_STRATA = 10


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Images (n, c, h, w), uint8 or float32, with labels int64 (n,)."""

    name: str
    classes: int
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    site_names: tuple[str, ...] = ()
    site_ids: Tensor | None = None

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return self.train_images.shape[1]

    @property
    def size(self) -> int:
        """Height and width of an image."""
        return self.train_images.shape[2]

    @property
    def has_top5(self) -> bool:
        """Whether the top-5 accuracy is reported: not for ten classes, as is usual."""
        return False

    @property
    def train_count(self) -> int:
        """Number of training samples."""
        return len(self.train_labels)

    @property
    def test_count(self) -> int:
        """Number of test samples."""
        return len(self.test_labels)

    @property
    def strata(self) -> Tensor:
        """The labels: what a skewed sharding distributes unevenly."""
        return self.train_labels

    def train(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Training images and labels of these indices."""
        return self.train_images[indices], self.train_labels[indices]

    def test(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Test images and labels of these indices."""
        return self.test_images[indices], self.test_labels[indices]

    def prefetch_train(self, indices: Tensor) -> None:
        """Nothing to do: all images are in memory."""

    def prefetch_test(self, indices: Tensor) -> None:
        """Nothing to do: all images are in memory."""


@dataclass(frozen=True, kw_only=True)
class TextDataset:
    """Characters as int64 tokens. Sample i is the window that starts at i · context; its labels are shifted by one."""

    name: str
    vocabulary: str  # token t is vocabulary[t]
    context: int
    train_tokens: Tensor
    test_tokens: Tensor
    channels: int = 1
    site_names: tuple[str, ...] = ()
    site_ids: Tensor | None = None

    @property
    def classes(self) -> int:
        """Number of different characters."""
        return len(self.vocabulary)

    @property
    def has_top5(self) -> bool:
        """Whether the top-5 accuracy is reported: not for characters, as is usual."""
        return False

    @property
    def size(self) -> int:
        """Characters in a window."""
        return self.context

    @property
    def train_count(self) -> int:
        """Number of training windows."""
        return (len(self.train_tokens) - 1) // self.context

    @property
    def test_count(self) -> int:
        """Number of test windows."""
        return (len(self.test_tokens) - 1) // self.context

    @property
    def strata(self) -> Tensor:
        """For each training window, its tenth of the text: what a skewed sharding distributes unevenly."""
        return torch.arange(self.train_count) * _TEXT_STRATA // max(1, self.train_count)

    def train(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Training windows (n, context), and for each of their characters the next one."""
        return _windows(self.train_tokens, indices, self.context)

    def test(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Test windows, and for each of their characters the next one."""
        return _windows(self.test_tokens, indices, self.context)

    def prefetch_train(self, indices: Tensor) -> None:
        """Nothing to do: the whole text is in memory."""

    def prefetch_test(self, indices: Tensor) -> None:
        """Nothing to do: the whole text is in memory."""


AnyDataset: TypeAlias = Dataset | TextDataset | FolderDataset


def _windows(tokens: Tensor, indices: Tensor, context: int) -> tuple[Tensor, Tensor]:
    places = indices[:, None] * context + torch.arange(context)
    return tokens[places], tokens[places + 1]


def default_directory() -> Path:
    """Where downloaded data is kept: $XDG_CACHE_HOME/weightgrad/data, by default ~/.cache/weightgrad/data."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "weightgrad" / "data"


def load(
    name: str,
    directory: Path | None = None,
    seed: int = 0,
    limit: int | None = None,
    *,
    size: int = folder.SIZE,
    threads: int = folder.THREADS,
    context: int = CONTEXT,
) -> AnyDataset:
    """Load a data set.

    Args:
        name: One of NAMES.
        directory: Where downloaded data is, or the images of `folder`; None means the user's cache.
        seed: Decides the order of digits and folders, and what `synthetic` is.
        limit: Keep only so many training samples; None means all.
        size: Side of the images of `folder`.
        threads: Threads that decode the images of `folder`.
        context: Characters in a window of a text.

    Raises:
        DataError: There is no such data set, or its files are missing.
    """
    if name not in NAMES:
        raise DataError(f"no data set {name!r}; there are {', '.join(NAMES)}")
    if limit is not None and limit < 1:
        raise DataError(f"limit {limit} leaves no training samples; give 1 or more, or none for all")
    if name == "sotu":
        return _text(_fetched(name, directory) / "sotu.txt", limit, context)
    if name == "folder":
        if directory is None:
            raise DataError("data set folder needs a directory with train/CLASS/*.png and test/CLASS/*.png")
        return FolderDataset(folder.find(directory, seed=seed), size=size, threads=threads, limit=limit)
    made = _images(name, directory, seed)
    if limit is None:
        return made
    return replace(made, train_images=made.train_images[:limit], train_labels=made.train_labels[:limit])


def _images(name: str, directory: Path | None, seed: int) -> Dataset:
    if name == "digits":
        tensors = builtin.digits(seed)
    elif name == "synthetic":
        tensors = builtin.synthetic(seed)
    elif name == "cifar10":
        tensors = _cifar(_fetched(name, directory))
    else:
        tensors = _idx_set(_fetched(name, directory))
    a, b, c, d = tensors
    return Dataset(name=name, classes=10, train_images=a, train_labels=b, test_images=c, test_labels=d)


def _fetched(name: str, directory: Path | None) -> Path:
    place = (default_directory() if directory is None else directory) / name
    option = "" if directory is None else f" --directory {directory}"
    for file in FILES[name]:
        path = place / file.name
        if not path.is_file():
            raise DataError(
                f"{name} is not in {place} ({file.name} is missing); run weightgrad data fetch {name}{option}"
            )
        if path.stat().st_size != file.size:
            raise DataError(
                f"{path} has {path.stat().st_size} bytes instead of {file.size}; "
                f"remove it and run weightgrad data fetch {name}{option}"
            )
    return place


def _cifar(place: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def read(names: list[str]) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(np.concatenate([np.fromfile(place / n, np.uint8) for n in names])).view(-1, 3073)
        return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()

    return (*read([f"data_batch_{i}.bin" for i in range(1, 6)]), *read(["test_batch.bin"]))


def _idx_set(place: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def read(part: str) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(np.fromfile(place / f"{part}-images-idx3-ubyte", np.uint8)[16:])
        labels = torch.from_numpy(np.fromfile(place / f"{part}-labels-idx1-ubyte", np.uint8)[8:])
        return pixels.view(-1, 1, 28, 28), labels.long()

    return (*read("train"), *read("t10k"))


def _text(path: Path, limit: int | None, context: int) -> TextDataset:
    if context < 1:
        raise DataError(f"context {context} is no window; give 1 or more characters")
    codes = np.frombuffer(path.read_text(encoding="utf-8").encode("utf-32-le"), np.uint32)
    characters = np.flatnonzero(np.bincount(codes))
    token_of = np.zeros(characters[-1] + 1, np.int64)
    token_of[characters] = np.arange(len(characters))
    every = torch.from_numpy(token_of[codes])
    cut = len(every) - len(every) // 10
    train = every[:cut] if limit is None else every[: min(cut, limit * context + 1)]
    vocabulary = "".join(chr(c) for c in characters)
    return TextDataset(name="sotu", vocabulary=vocabulary, context=context, train_tokens=train, test_tokens=every[cut:])

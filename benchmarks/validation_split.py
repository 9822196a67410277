"""A tenth of the training data in place of the test data, as files that `data.directory` can name.

The training part of a recipe is then `data.limit` samples, its test part the first `held_out` of the test file.
Both data sets are stored in random order, so the last tenth is as good as any.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weightgrad.lab.data.datasets import default_directory

_CIFAR_RECORD, _PIXELS = 3073, 784


@dataclass(frozen=True)
class Split:
    """Where the files are, how many samples train and how many validate."""

    directory: Path
    train: int
    held_out: int

    def settings(self, evaluate_on: int) -> list[str]:
        """For a recipe; validates on at most so many."""
        return [
            f"data.directory={self.directory}",
            f"data.limit={self.train}",
            f"training.evaluate_on={min(evaluate_on, self.held_out)}",
        ]


def cifar10(directory: Path) -> Split:
    """45,000 and 5,000 images; what follows the 5,000 in the test file is the test data's, and not to be read."""
    source, place = default_directory() / "cifar10", directory / "cifar10"
    place.mkdir(parents=True, exist_ok=True)
    for number in range(1, 6):
        _link(source / f"data_batch_{number}.bin", place)
    held = (source / "data_batch_5.bin").read_bytes()[-5000 * _CIFAR_RECORD :]
    _write(place / "test_batch.bin", held, (source / "test_batch.bin").read_bytes(), 0)
    return Split(directory, 45_000, 5_000)


def fashion_mnist(directory: Path) -> Split:
    """54,000 and 6,000 images, likewise."""
    source, place = default_directory() / "fashion-mnist", directory / "fashion-mnist"
    place.mkdir(parents=True, exist_ok=True)
    for kind, size, head in (("images-idx3-ubyte", _PIXELS, 16), ("labels-idx1-ubyte", 1, 8)):
        _link(source / f"train-{kind}", place)
        held = (source / f"train-{kind}").read_bytes()[-6000 * size :]
        _write(place / f"t10k-{kind}", held, (source / f"t10k-{kind}").read_bytes(), head)
    return Split(directory, 54_000, 6_000)


def _link(source: Path, place: Path) -> None:
    target = place / source.name
    if not target.exists():
        target.symlink_to(source)


def _write(path: Path, held: bytes, test: bytes, head: int) -> None:
    """The test file with the held-out samples first: the loader knows a data set by the sizes of its files."""
    path.write_bytes(test[:head] + held + test[head + len(held) :])

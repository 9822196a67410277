"""A tenth of the training data in place of the test data, as files that `data.directory` can name.

The training part of a recipe is then `data.limit` samples, its test part the first `held_out` of the test file.
Both data sets are stored in random order, so the last tenth is as good as any.
"""

from __future__ import annotations

import os
from pathlib import Path

from weightgrad.lab.data.datasets import default_directory

_CIFAR_RECORD, _PIXELS = 3073, 784


SIZES = {"cifar10": (45_000, 5_000), "fashion-mnist": (54_000, 6_000)}  # images to train on and to validate with


def settings(name: str, evaluate_on: int) -> list[str]:
    """For a recipe that holds out a tenth; validates with at most so many."""
    train, held_out = SIZES[name]
    return [f"data.limit={train}", f"training.evaluate_on={min(evaluate_on, held_out)}"]


def write(name: str, directory: Path) -> Path:
    """Write the files of a data set with a tenth held out, if they are not there, and return `data.directory`.

    What follows the held-out samples in the test file is the test data's, and not to be read.
    """
    source, place = default_directory() / name, directory / name
    place.mkdir(parents=True, exist_ok=True)
    held_out = SIZES[name][1]
    if name == "cifar10":
        for number in range(1, 6):
            _link(source / f"data_batch_{number}.bin", place)
        held = (source / "data_batch_5.bin").read_bytes()[-held_out * _CIFAR_RECORD :]
        _write(place / "test_batch.bin", held, source / "test_batch.bin", 0)
    else:
        for kind, size, head in (("images-idx3-ubyte", _PIXELS, 16), ("labels-idx1-ubyte", 1, 8)):
            _link(source / f"train-{kind}", place)
            held = (source / f"train-{kind}").read_bytes()[-held_out * size :]
            _write(place / f"t10k-{kind}", held, source / f"t10k-{kind}", head)
    return directory


def _link(source: Path, place: Path) -> None:
    target = place / source.name
    if not target.exists():
        target.symlink_to(source)


def _write(path: Path, held: bytes, source: Path, head: int) -> None:
    """The test file with the held-out samples first: the loader knows a data set by the sizes of its files."""
    if path.exists() and path.stat().st_size == source.stat().st_size:
        return
    test = source.read_bytes()
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(test[:head] + held + test[head + len(held) :])
    os.replace(partial, path)

"""Data sets have the shapes and labels they should; what is missing is said with the command that gets it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weightgrad.errors import DataError
from weightgrad.lab.data import builtin, datasets
from weightgrad.lab.data.datasets import Dataset, TextDataset
from weightgrad.lab.data.sources import FILES

FETCHED = {
    "cifar10": (50_000, 10_000, 3, 32, [5000] * 10, [1000] * 10),
    "fashion-mnist": (60_000, 10_000, 1, 28, [6000] * 10, [1000] * 10),
    "mnist": (60_000, 10_000, 1, 28, [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
              [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]),
}  # fmt: skip


def real(name: str) -> datasets.AnyDataset:
    place = datasets.default_directory() / name
    if not all((place / file.name).is_file() for file in FILES[name]):
        pytest.skip(f"{name} is not fetched; weightgrad data fetch {name}")
    return datasets.load(name)


@pytest.mark.parametrize("name", FETCHED)
def test_fetched_images(name: str) -> None:
    made = real(name)
    assert isinstance(made, Dataset)
    train, test, channels, size, train_counts, test_counts = FETCHED[name]
    assert made.train_images.shape == (train, channels, size, size)
    assert made.test_images.shape == (test, channels, size, size)
    assert made.train_images.dtype == torch.uint8
    assert made.train_labels.bincount().tolist() == train_counts
    assert made.test_labels.bincount().tolist() == test_counts
    assert (made.classes, made.channels, made.size, made.train_count) == (10, channels, size, train)


def test_fetched_text() -> None:
    made = real("sotu")
    assert isinstance(made, TextDataset)
    assert made.vocabulary.isascii()
    assert made.classes == 86
    assert len(made.test_tokens) == (len(made.train_tokens) + len(made.test_tokens)) // 10


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_sets_without_a_download(name: str) -> None:
    made = datasets.load(name, seed=1)
    assert isinstance(made, Dataset)
    again, other = datasets.load(name, seed=1), datasets.load(name, seed=2)
    assert isinstance(again, Dataset)
    assert isinstance(other, Dataset)
    assert torch.equal(made.train_images, again.train_images)
    assert not torch.equal(made.train_images, other.train_images)
    assert made.train_images.dtype == torch.float32
    assert made.train_labels.dtype == torch.int64
    assert sorted(made.train_labels.unique().tolist()) == list(range(10))
    images, labels = made.train(torch.tensor([5, 0]))
    assert torch.equal(images[1], made.train_images[0])
    assert int(labels[0]) == int(made.train_labels[5])


def test_synthetic_classes_are_equally_likely() -> None:
    made = datasets.load("synthetic")
    assert isinstance(made, Dataset)
    assert made.train_images.shape == (6000, 1, 16, 16)
    assert (made.train_labels.bincount() + made.test_labels.bincount()).tolist() == [700] * 10


def test_limit_keeps_the_first() -> None:
    whole, some = datasets.load("digits"), datasets.load("digits", limit=100)
    assert isinstance(whole, Dataset)
    assert isinstance(some, Dataset)
    assert some.train_count == 100
    assert torch.equal(some.train_images, whole.train_images[:100])
    assert some.test_count == whole.test_count


def text(directory: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    (directory / "sotu").mkdir()
    (directory / "sotu" / "sotu.txt").write_text(body)
    (file,) = FILES["sotu"]
    monkeypatch.setitem(FILES, "sotu", (type(file)(file.name, len(body), file.sha256),))


def test_text_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "hello tools, " * 20
    text(tmp_path, monkeypatch, body)
    made = datasets.load("sotu", tmp_path, context=8)
    assert isinstance(made, TextDataset)
    assert made.vocabulary == "".join(sorted(set(body)))
    read = "".join(made.vocabulary[t] for t in torch.cat([made.train_tokens, made.test_tokens]).tolist())
    assert read == body
    every = torch.arange(made.train_count)
    windows, labels = made.train(every)
    assert windows.shape == (234 // 8, 8)
    assert torch.equal(windows.flatten(), made.train_tokens[: windows.numel()])
    assert torch.equal(labels.flatten(), made.train_tokens[1 : windows.numel() + 1])
    assert made.test(torch.arange(made.test_count))[0].shape == (3, 8)
    assert len(made.strata) == made.train_count
    assert sorted(made.strata.unique().tolist()) == list(range(10))
    some = datasets.load("sotu", tmp_path, limit=4, context=8)
    assert (some.train_count, some.classes) == (4, made.classes)


@pytest.mark.parametrize("name", sorted(FILES))
def test_what_is_missing_is_said_with_the_command(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"weightgrad data fetch {name} --directory"):
        datasets.load(name, tmp_path)


def test_the_cache_follows_the_desktop_standard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert datasets.default_directory() == tmp_path / "weightgrad" / "data"
    with pytest.raises(DataError, match=r"weightgrad data fetch mnist$"):
        datasets.load("mnist")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert datasets.default_directory() == tmp_path / ".cache" / "weightgrad" / "data"


def test_a_file_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sotu").mkdir()
    (tmp_path / "sotu" / "sotu.txt").write_text("short")
    with pytest.raises(DataError, match="has 5 bytes instead of"):
        datasets.load("sotu", tmp_path)


@pytest.mark.parametrize(("name", "limit", "message"), [
    ("cifar11", None, "no data set 'cifar11'; there are cifar10"),
    ("digits", 0, "limit 0 leaves no training samples"),
    ("folder", None, "folder needs a directory"),
])  # fmt: skip
def test_mistakes_are_named(name: str, limit: int | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        datasets.load(name, limit=limit)


def test_digits_are_those_that_scikit_learn_loads() -> None:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    train_images, train_labels, test_images, test_labels = builtin.digits(0)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8)[order] / 16
    assert torch.equal(torch.cat([train_images, test_images]), images)
    assert torch.equal(torch.cat([train_labels, test_labels]), torch.from_numpy(labels).long()[order])

"""The user's own images, with and without sites."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from weightgrad.errors import DataError
from weightgrad.lab.data import datasets, folder
from weightgrad.lab.data.datasets import Dataset

RED, BLUE = (250, 0, 0), (0, 0, 250)


def paint(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (40, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def test_classes_are_folders(tmp_path: Path) -> None:
    for i in range(3):
        paint(tmp_path / "train" / "red" / f"{i}.png", RED)
        paint(tmp_path / "train" / "blue" / f"{i}.JPG", BLUE, (16, 50))
    paint(tmp_path / "test" / "red" / "a.jpeg", RED)
    (tmp_path / "train" / "red" / "notes.txt").write_text("no image")
    made = datasets.load("folder", tmp_path, size=20)
    assert isinstance(made, Dataset)
    assert made.train_images.shape == (6, 3, 20, 20)
    assert made.train_images.dtype == torch.uint8
    assert (made.classes, made.site_ids, made.site_names) == (2, None, ())
    for image, label in zip(made.train_images, made.train_labels, strict=True):
        assert image[2 if label == 0 else 0].float().mean() > 240  # blue comes before red
    assert made.test_labels.tolist() == [1]
    first = folder.load(tmp_path, size=8, seed=0).train_labels
    assert any(not torch.equal(first, folder.load(tmp_path, size=8, seed=s).train_labels) for s in range(1, 6))


def test_the_middle_is_kept(tmp_path: Path) -> None:
    picture = Image.new("RGB", (60, 20), RED)
    picture.paste(Image.new("RGB", (20, 20), BLUE), (20, 0))
    (tmp_path / "train" / "x").mkdir(parents=True)
    picture.save(tmp_path / "train" / "x" / "a.png")
    paint(tmp_path / "test" / "x" / "a.png", RED)
    image = folder.load(tmp_path, size=20).train_images[0]
    assert image[2].min() == 250
    assert image[0].max() == 0


def test_sites(tmp_path: Path) -> None:
    for site, colours in (("north", [("red", RED)]), ("south", [("red", RED), ("blue", BLUE)])):
        for name, colour in colours:
            for i in range(4):
                paint(tmp_path / site / "train" / name / f"{i}.png", colour)
    paint(tmp_path / "south" / "test" / "blue" / "0.png", BLUE)
    made = datasets.load("folder", tmp_path, limit=10)
    assert isinstance(made, Dataset)
    assert made.site_names == ("north", "south")
    assert made.site_ids is not None
    assert len(made.site_ids) == len(made.train_labels) == 10
    assert set(made.train_labels[made.site_ids == 0].tolist()) == {1}
    whole = folder.load(tmp_path)
    assert whole.site_ids is not None
    assert whole.site_ids.bincount().tolist() == [4, 8]


@pytest.mark.parametrize(("files", "message"), [
    ([], "neither train/CLASS/ nor SITE/train/CLASS/"),
    (["train/a/1.png"], "no .png or .jpg in .*/test/CLASS/"),
    (["north/train/a/1.png"], "no .png or .jpg in .*/SITE/test/CLASS/"),
    (["train/a/1.png", "test/b/1.png"], "classes b are in test but not in train"),
])  # fmt: skip
def test_what_is_missing_is_named(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        paint(tmp_path / name, RED)
    with pytest.raises(DataError, match=message):
        folder.load(tmp_path)


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    paint(tmp_path / "test" / "a" / "1.png", RED)
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "train" / "a" / "broken.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"broken\.png cannot be read as an image"):
        folder.load(tmp_path)
    with pytest.raises(DataError, match="is not a directory"):
        folder.load(tmp_path / "nowhere")

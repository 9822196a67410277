"""The user's own images, with and without sites."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from weightgrad.errors import DataError
from weightgrad.lab.data import datasets, folder
from weightgrad.lab.data.folder import FolderDataset

RED, BLUE = (250, 0, 0), (0, 0, 250)


def paint(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (40, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def every(count: int) -> torch.Tensor:
    return torch.arange(count)


def test_classes_are_folders(tmp_path: Path) -> None:
    for i in range(3):
        paint(tmp_path / "train" / "red" / f"{i}.png", RED)
        paint(tmp_path / "train" / "blue" / f"{i}.JPG", BLUE, (16, 50))
    paint(tmp_path / "test" / "red" / "a.jpeg", RED)
    (tmp_path / "train" / "red" / "notes.txt").write_text("no image")
    made = datasets.load("folder", tmp_path, size=20)
    assert isinstance(made, FolderDataset)
    images, labels = made.train(every(made.train_count))
    assert images.shape == (6, 3, 20, 20)
    assert images.dtype == torch.uint8
    assert (made.classes, made.site_ids, made.site_names) == (2, None, ())
    for image, label in zip(images, labels, strict=True):
        assert image[2 if label == 0 else 0].float().mean() > 240  # blue comes before red
    assert made.test(every(1))[1].tolist() == [1]
    first = folder.find(tmp_path, seed=0).train_labels
    assert any(not torch.equal(first, folder.find(tmp_path, seed=s).train_labels) for s in range(1, 6))


def test_the_middle_is_kept(tmp_path: Path) -> None:
    picture = Image.new("RGB", (60, 20), RED)
    picture.paste(Image.new("RGB", (20, 20), BLUE), (20, 0))
    (tmp_path / "train" / "x").mkdir(parents=True)
    picture.save(tmp_path / "train" / "x" / "a.png")
    paint(tmp_path / "test" / "x" / "a.png", RED)
    image = FolderDataset(folder.find(tmp_path), size=20).train(every(1))[0][0]
    assert image[2].min() == 250
    assert image[0].max() == 0


def test_sites(tmp_path: Path) -> None:
    for site, colours in (("north", [("red", RED)]), ("south", [("red", RED), ("blue", BLUE)])):
        for name, colour in colours:
            for i in range(4):
                paint(tmp_path / site / "train" / name / f"{i}.png", colour)
    paint(tmp_path / "south" / "test" / "blue" / "0.png", BLUE)
    made = datasets.load("folder", tmp_path, limit=10)
    assert isinstance(made, FolderDataset)
    assert made.site_names == ("north", "south")
    assert made.site_ids is not None
    assert len(made.site_ids) == len(made.strata) == made.train_count == 10
    assert set(made.strata[made.site_ids == 0].tolist()) == {1}
    whole = folder.find(tmp_path)
    assert whole.site_ids is not None
    assert whole.site_ids.bincount().tolist() == [4, 8]


def test_top5_is_for_more_than_five_classes(tmp_path: Path) -> None:
    for number in range(6):
        if number:
            assert not FolderDataset(folder.find(tmp_path)).has_top5
        for part in ("train", "test"):
            paint(tmp_path / part / f"class {number}" / "0.png", RED)
    assert FolderDataset(folder.find(tmp_path)).has_top5


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
        folder.find(tmp_path)


@pytest.mark.parametrize("threads", [0, 2])
def test_a_damaged_image_is_named_when_it_is_used(tmp_path: Path, threads: int) -> None:
    paint(tmp_path / "test" / "a" / "1.png", RED)
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "train" / "a" / "broken.png").write_bytes(b"no image")
    made = FolderDataset(folder.find(tmp_path), threads=threads)
    made.prefetch_train(every(1))
    with pytest.raises(DataError, match=r"broken\.png cannot be read as an image"):
        made.train(every(1))
    with pytest.raises(DataError, match="is not a directory"):
        folder.find(tmp_path / "nowhere")
    with pytest.raises(DataError, match="0x0 pixels"):
        FolderDataset(folder.find(tmp_path), size=0)

"""Images are the same whoever decodes them, in whatever order, and however far ahead."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from weightgrad.lab.data import image_reader
from weightgrad.lab.data.image_reader import ImageReader, read_image


@pytest.fixture(name="paths")
def some_images(tmp_path: Path) -> list[Path]:
    random = np.random.default_rng(0)
    paths = []
    for number in range(8):
        pixels = random.integers(0, 256, (30 + 5 * number, 60 - 3 * number, 3), dtype=np.uint8)
        paths.append(tmp_path / f"{number}.{'jpg' if number % 2 else 'png'}")
        Image.fromarray(pixels).save(paths[-1])
    return paths


@pytest.mark.parametrize(("threads", "ahead"), [(0, 8), (1, 8), (3, 8), (3, 2)])
def test_threads_change_no_pixel(paths: list[Path], threads: int, ahead: int) -> None:
    reader = ImageReader(paths, 24, threads=threads, ahead=ahead)
    wanted = torch.tensor([5, 0, 7, 0, 2])  # one of them twice
    reader.prefetch(torch.tensor([7, 1, 5]))
    found = reader.read(wanted)
    assert found.shape == (5, 3, 24, 24)
    for image, index in zip(found, wanted.tolist(), strict=True):
        assert np.array_equal(image.permute(1, 2, 0).numpy(), read_image(paths[index], 24))
    assert torch.equal(reader.read(wanted), found)


def test_images_are_decoded_before_they_are_asked_for(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = threading.Semaphore(0)

    def read(path: Path, side: int) -> image_reader.Pixels:
        assert threading.current_thread() is not threading.main_thread()
        pixels = read_image(path, side)
        decoded.release()
        return pixels

    monkeypatch.setattr(image_reader, "read_image", read)
    reader = ImageReader(paths, 16, threads=2, ahead=8)
    reader.prefetch(torch.arange(4))
    for _ in range(4):
        assert decoded.acquire(timeout=60)  # nobody has asked for them
    reader.read(torch.arange(4))
    assert not decoded.acquire(blocking=False)  # and nothing was decoded twice


def test_what_waits_is_bounded(paths: list[Path]) -> None:
    reader = ImageReader(paths, 16, threads=1, ahead=3)
    reader.prefetch(torch.arange(8))
    assert list(reader._waiting) == [5, 6, 7]


def test_grey_and_transparent_images_become_rgb(tmp_path: Path) -> None:
    Image.new("L", (20, 20), 100).save(tmp_path / "grey.jpg")
    Image.new("RGBA", (20, 20), (10, 20, 30, 128)).save(tmp_path / "clear.png")
    assert read_image(tmp_path / "grey.jpg", 10).shape == (10, 10, 3)
    assert read_image(tmp_path / "clear.png", 10)[0, 0].tolist() == [10, 20, 30]


def test_a_large_photograph_is_decoded_small(tmp_path: Path) -> None:
    """JPEG can be decoded at a fraction of its size; what comes out is the same picture."""
    across = np.linspace(0, 255, 640)[None, :, None] * np.ones((480, 1, 3))
    Image.fromarray(across.astype(np.uint8)).save(tmp_path / "ramp.jpg", quality=95)
    small = read_image(tmp_path / "ramp.jpg", 32).astype(float)
    middle = np.linspace(0, 255, 640)[80:560].reshape(32, 15).mean(1)
    assert np.abs(small.mean((0, 2)) - middle).max() < 4

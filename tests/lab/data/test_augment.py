"""Crops and flips are what they say, follow from the key, and scaling takes mean and deviation out."""

from __future__ import annotations

import pytest
import torch

from weightgrad.errors import DataError
from weightgrad.lab import models
from weightgrad.lab.data import augment, datasets


def photographs(n: int = 40, size: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (n, 3, size, size), generator=generator, dtype=torch.uint8)


def standardised(image: torch.Tensor) -> torch.Tensor:
    values = image.double()
    return ((values - values.mean()) / values.std(correction=0)).float()


def test_cifarnet_trains_on_random_crops_and_flips() -> None:
    images = photographs()
    made = augment.pipeline("cifar10", "cifarnet").train(images, key=7)
    assert made.shape == (40, 3, 24, 24)
    assert made.dtype == torch.float32
    found = set()
    for image, result in zip(images, made, strict=True):
        matches = [
            (y, x, flip)
            for y in range(9)
            for x in range(9)
            for flip in (False, True)
            if torch.allclose(standardised(_crop(image, y, x, flip)), result, atol=1e-4)
        ]
        assert len(matches) == 1
        found.add(matches[0])
    assert len({y for y, _, _ in found}) > 5
    assert len({x for _, x, _ in found}) > 5
    assert {flip for _, _, flip in found} == {False, True}


def _crop(image: torch.Tensor, y: int, x: int, flip: bool, side: int = 24) -> torch.Tensor:
    cut = image[:, y : y + side, x : x + side]
    return cut.flip(2) if flip else cut


def test_cifarnet_is_tested_on_the_middle() -> None:
    images = photographs(3)
    made = augment.pipeline("cifar10", "cifarnet").test(images)
    for image, result in zip(images, made, strict=True):
        torch.testing.assert_close(result, standardised(image[:, 4:28, 4:28]), atol=1e-5, rtol=1e-5)
    flat = torch.full((1, 3, 32, 32), 9, dtype=torch.uint8)
    assert not augment.pipeline("cifar10", "cifarnet").test(flat).any()  # no division by zero


def test_others_pad_crop_and_flip() -> None:
    images = photographs(12)
    pipe = augment.pipeline("cifar10", "resnet20")
    padded = torch.zeros(12, 3, 40, 40, dtype=torch.uint8)
    padded[:, :, 4:36, 4:36] = images
    made = pipe.train(images, key=3)
    plain = augment.pipeline("cifar10", "resnet20", augment=False)
    for image, result in zip(padded, made, strict=True):
        candidates = [_crop(image, y, x, f, 32) for y in range(9) for x in range(9) for f in (False, True)]
        distance = (plain.test(torch.stack(candidates)) - result).abs().amax((1, 2, 3))
        assert distance.min() < 1e-5


def test_train_is_pure_in_its_key() -> None:
    images, pipe = photographs(), augment.pipeline("cifar10", "cifarnet")
    before = images.clone()
    state = torch.random.get_rng_state()
    assert torch.equal(pipe.train(images, 1), pipe.train(images, 1))
    assert not torch.equal(pipe.train(images, 1), pipe.train(images, 2))
    assert torch.equal(images, before)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_without_augmentation_training_is_testing() -> None:
    images = photographs()
    for model in ("cifarnet", "resnet20"):
        pipe = augment.pipeline("cifar10", model, augment=False)
        assert torch.equal(pipe.train(images, 1), pipe.test(images))


@pytest.mark.parametrize(("name", "mean", "deviation"), [("mnist", 0.1307, 0.3081), ("fashion-mnist", 0.2860, 0.3530)])
def test_grey_sets_are_scaled_only(name: str, mean: float, deviation: float) -> None:
    images = photographs()[:, :1, :28, :28]
    made = augment.pipeline(name, "lenet").train(images, 5)
    torch.testing.assert_close(made, (images / 255 - mean) / deviation, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["digits", "synthetic", "sotu"])
def test_what_is_ready_passes(name: str) -> None:
    values = torch.randn(3, 1, 8, 8) if name != "sotu" else torch.arange(12).view(3, 4)
    pipe = augment.pipeline(name, "mlp")
    assert torch.equal(pipe.train(values, 1), values)
    assert torch.equal(pipe.test(values), values)


def test_every_data_set_has_a_pipeline_that_says_its_size() -> None:
    for name in datasets.NAMES:
        for model in models.available():
            cut = model == "cifarnet" and name in ("cifar10", "folder")
            assert augment.pipeline(name, model).size(32) == (24 if cut else 32)
    with pytest.raises(DataError, match="no pipeline for data set 'x'"):
        augment.pipeline("x", "mlp")


def test_folders_smaller_than_a_crop_are_refused() -> None:
    with pytest.raises(DataError, match="24x24 or larger, not 16x16"):
        augment.pipeline("folder", "cifarnet").test(photographs(2, 16))

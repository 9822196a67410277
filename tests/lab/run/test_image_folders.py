"""Recipes on folders of images: any number of threads, top-5, sizes, and mistakes at their key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from weightgrad import event_log
from weightgrad.errors import RecipeError
from weightgrad.lab.data import drawing
from weightgrad.lab.data.drawing import DrawPlan
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.simulation import simulate
from weightgrad.lab.run.task import Training

ROOT = Path(__file__).parents[3]
IMAGENET = Recipe.load(ROOT / "recipes" / "imagenet.yaml")


@pytest.fixture(name="pictures", scope="module")
def drawn_pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("drawn") / "pictures"
    drawing.draw(place, DrawPlan(classes=6, train=8, test=4, size=48, sites=("east", "west")))
    return place


def small(pictures: Path, *settings: str) -> Recipe:
    return IMAGENET.with_settings([
        f"data.directory={pictures}", "data.size=32", "training.steps=8", "training.batch=16", "training.warmup=0",
        "training.evaluate_every=8", *settings,
    ])  # fmt: skip


def test_threads_change_no_bit(pictures: Path, tmp_path: Path) -> None:
    for threads in (0, 3):
        simulate(small(pictures, "model.name=lenet", f"data.threads={threads}"), tmp_path / str(threads))
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("0", "3")]
    assert models[0] == models[1]
    logs = [event_log.read(tmp_path / name / "events.jsonl")[1:] for name in ("0", "3")]  # the first has the recipe
    assert logs[0] == logs[1]


def test_it_learns_and_reports_top5(pictures: Path, tmp_path: Path) -> None:
    learning = ["model.name=lenet", "training.optimizer.lr=0.05", "training.steps=60", "training.evaluate_every=20"]
    recipe = small(pictures, *learning)
    summary = simulate(recipe, tmp_path)
    assert summary["accuracy"] > 2 / 6
    assert summary["accuracy"] <= summary["top5_accuracy"] <= 1
    assert summary["top5_accuracy"] > 5 / 6
    lines = [line for line in event_log.read(tmp_path / "events.jsonl") if line["kind"] == "evaluate"]
    assert all(line["accuracy"] <= line["top5_accuracy"] <= 1 for line in lines)
    assert json.loads((tmp_path / "summary.json").read_text())["top5_accuracy"] == summary["top5_accuracy"]


def test_top5_counts_the_five_highest_scores(pictures: Path) -> None:
    task = Training(small(pictures))
    score = task.evaluate(task.initial())
    images, labels = task._dataset.test(task._test)
    with torch.no_grad():
        order = task.module(task._pipeline.test(images)).argsort(1, descending=True)
    places = (order == labels[:, None]).nonzero()[:, 1]
    assert score.accuracy == float((places < 1).double().mean())
    assert score.top5 == float((places < 5).double().mean())


def test_sites_train_on_their_own_folders(pictures: Path) -> None:
    task = Training(small(pictures))
    assert task._dataset.site_ids is not None
    for number in range(2):
        for batches in task._batches[number]:
            assert set(task._dataset.site_ids[batches.at(0)].tolist()) == {number}


def test_training_crops_at_random_and_tests_the_middle(pictures: Path) -> None:
    task = Training(small(pictures))
    images, _ = task._dataset.train(torch.arange(4))
    assert images.shape[2:] == (36, 36)
    assert task._pipeline.train(images, 1).shape[2:] == (32, 32)
    middle = task._pipeline.test(images)
    assert torch.equal(middle, task._pipeline.test(images[:, :, 2:34, 2:34]))
    assert not torch.equal(task._pipeline.train(images, 1), task._pipeline.train(images, 2))
    cifarnet = Training(small(pictures, "model.name=cifarnet"))
    assert cifarnet._dataset.size == 32
    assert cifarnet._pipeline.train(images[:, :, :32, :32], 1).shape[2:] == (24, 24)


def test_alexnet_at_224(pictures: Path) -> None:
    task = Training(small(pictures, "data.size=224", "model.name=alexnet"))
    images, _ = task._dataset.train(torch.arange(1))
    assert images.shape == (1, 3, 256, 256)
    with torch.no_grad():
        assert task.module(task._pipeline.train(images, 0)).shape == (1, 6)


@pytest.mark.parametrize(("settings", "message"), [
    (["model.options.size=224"], r"model\.options\.size: .*set data\.size"),
    (["model.options.width=3"], r"model\.options\.width: model alexnet32 has no option width; it has no options"),
    (["model.name=alexnet"], r"data\.size: alexnet reads images of 63x63 or larger, not 32x32"),
    (["model.name=cifarnet", "data.size=20"], r"data\.size: a crop of 24x24 needs images of 24x24 or larger"),
    (["model.name=vgg-a-32", "model.options={dropout: much}"], r"model\.options: vgg-a-32 cannot be made with them"),
    (["model.name=vgg"], r"model\.name: no model 'vgg'"),
    (["data.directory=nowhere"], r"data\.directory: nowhere is not a directory"),
    (["data.name=digits"], r"data\.size: found 32; only images of folder are resized"),
    (["data.size=0"], r"data\.size: found 0"),
])  # fmt: skip
def test_mistakes_name_their_key(pictures: Path, settings: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Training(small(pictures, *settings))


def test_other_data_sets_have_their_own_size() -> None:
    laptop = Recipe.load(ROOT / "recipes" / "laptop.yaml")
    with pytest.raises(RecipeError, match=r"model\.options\.size: "):
        Training(laptop.with_settings(["model.options.size=224"]))

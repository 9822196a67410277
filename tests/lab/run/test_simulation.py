"""Recipes run for real: against plain PyTorch, every strategy on digits, mistakes at their line, interrupts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from weightgrad import event_log
from weightgrad.core.strategies import PRESETS
from weightgrad.errors import RecipeError
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.simulation import Progress, chosen_strategy, fitted_strategy, rate_of, simulate
from weightgrad.lab.run.task import Training

ROOT = Path(__file__).parents[3]
LAPTOP = Recipe.load(ROOT / "recipes" / "laptop.yaml")

ONE_SITE = """
data: {{name: digits}}
model: {{name: lenet-digits}}
training: {{steps: 12, batch: 32, optimizer: {optimizer}, schedule: cosine, evaluate_every: 6}}
server: {{name: hub}}
sites: [{{name: home, workers: 1}}]
links: [{{between: [hub, home], bandwidth: 10 Mbit/s, delay: 5 ms}}]
compute: {{seconds_per_step: 0.01}}
strategy: baseline
"""

OPTIMIZERS = {
    "sgd": ("{name: sgd, lr: 0.05, momentum: 0.9, weight_decay: 0.001}", torch.optim.SGD, {"momentum": 0.9}),
    "adam": ("{name: adam, lr: 0.002, weight_decay: 0.001}", torch.optim.Adam, {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_site_with_fp32_is_plain_pytorch_bit_for_bit(name: str, tmp_path: Path) -> None:
    written, make, options = OPTIMIZERS[name]
    recipe = Recipe.parse(ONE_SITE.format(optimizer=written))
    simulate(recipe, tmp_path)
    found = load_file(tmp_path / "model.safetensors")

    task = Training(recipe)
    module = task.module
    task.layout.scatter(task.initial(), module)
    optimizer = make(module.parameters(), lr=1.0, weight_decay=0.001, **options)
    rate = rate_of(recipe)
    module.train()
    for step in range(12):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        images, labels = task._dataset.train(task._batches[0][0].at(step))
        optimizer.zero_grad()
        functional.cross_entropy(module(task._pipeline.train(images, 0)), labels).backward()
        optimizer.step()
    for parameter, value in module.named_parameters():
        assert torch.equal(value.detach(), found[parameter]), parameter


@pytest.mark.parametrize("name", PRESETS)
def test_every_strategy_reads_digits(name: str, tmp_path: Path) -> None:
    steps = 200 if name in ("adaptive", "dgc") else 130  # those two are slower to learn
    short = [f"strategy={name}", f"training.steps={steps}", f"training.evaluate_every={steps // 2}"]
    summary = simulate(LAPTOP.with_settings(short), tmp_path)
    assert summary["status"] == "finished"
    assert summary["accuracy"] >= 0.95
    rounds = [e for e in event_log.read(tmp_path / "events.jsonl") if e["kind"] == "round"]
    assert len(rounds) == summary["rounds"]


def test_the_same_recipe_gives_the_same_bytes(tmp_path: Path) -> None:
    short = LAPTOP.with_settings(["training.steps=20", "training.evaluate_every=10"])
    for place in ("a", "b"):
        simulate(short, tmp_path / place)
    for name in ("events.jsonl", "summary.json", "model.safetensors", "recipe.yaml"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_an_interrupted_run_can_be_read(tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.step >= 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(LAPTOP, tmp_path, watch=stop)
    assert event_log.read(tmp_path / "events.jsonl")[-1]["status"] == "interrupted"
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "interrupted"
    assert load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("strategy", "line", "told"),
    [
        ("strategy: wieghtgrad", 2, ["wieghtgrad", "did you mean weightgrad", "diloco"]),
        ('strategy:\n  name: adaptive\n  codec: "adaptive(pi=0)"', 4, ["pi", "0", "adaptive"]),
        ("strategy:\n  name: diloco\n  evry: 5", 4, ["evry", "did you mean every"]),
        ("strategy:\n  name: gaia\n  consistency: bounded(-1)", 4, ["bounded", "-1", "whole number"]),
        ("strategy:\n  name: gaia\n  trigger: sometimes(3)", 4, ["sometimes", "every", "significance"]),
    ],
)
def test_a_mistake_in_the_strategy_is_shown_at_its_line(strategy: str, line: int, told: list[str]) -> None:
    rest = ONE_SITE.format(optimizer=OPTIMIZERS["sgd"][0]).replace("strategy: baseline\n", "")
    recipe = Recipe.parse(f"name: wrong\n{strategy}\n{rest}", "wrong.yaml")
    with pytest.raises(RecipeError) as caught:
        chosen_strategy(recipe)
    assert f"wrong.yaml:{line}" in str(caught.value) or f"line {line}" in str(caught.value)
    for word in told:
        assert word in str(caught.value)


def test_schedules() -> None:
    def rates(settings: list[str], steps: list[int]) -> list[Any]:
        return [round(rate_of(LAPTOP.with_settings(settings))(s), 6) for s in steps]

    assert rates(["training.schedule=constant"], [0, 299]) == [0.05, 0.05]
    assert rates([], [0, 150]) == [0.05, 0.025]
    assert rates(["training.schedule={decay: 0.1, at: [10, 20]}"], [9, 10, 20]) == [0.05, 0.005, 0.0005]
    assert rates(["training.schedule=constant", "training.warmup=10"], [0, 9]) == [0.005, 0.05]


@pytest.mark.parametrize(
    ("settings", "shares", "aggregator"),
    [
        ([], "updates", "sender_mean"),
        (["training.optimizer={name: sgd, lr: 0.1}"], "updates", "mean"),
        (["compute.seconds_per_step=10"], "gradients", "mean"),
        (["compute.seconds_per_step=10", "training.optimizer={name: sgd, lr: 0.1}"], "updates", "mean"),
        (["compute.seconds_per_step=10", "strategy.shares=updates"], "updates", "mean"),
        (["compute.seconds_per_step=calibrate"], "updates", "sender_mean"),
    ],
)
def test_auto_is_fitted_to_the_optimizer_and_the_links(settings: list[str], shares: str, aggregator: str) -> None:
    recipe = Recipe.load(Path(__file__).parents[3] / "recipes" / "gpt.yaml").with_settings(settings)
    found = fitted_strategy(recipe, 167_552)
    assert (found.shares, found.aggregator) == (shares, aggregator)

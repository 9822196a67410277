"""A simulated run that goes on from a checkpoint writes the same event log and model as one without a pause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run import checkpoint
from weightgrad.lab.run.simulation import simulate
from weightgrad.lab.sim.network import Clock

ROOT = Path(__file__).parents[3]
SHORT = ["training.steps=6", "training.batch=6", "training.evaluate_on=20", "training.evaluate_every=2"]


def recipe(*settings: str) -> Recipe:
    return Recipe.load(ROOT / "recipes" / "laptop.yaml").with_settings([*SHORT, *settings])


def interrupted(monkeypatch: pytest.MonkeyPatch, chosen: Recipe, out: Path, *, after: int) -> None:
    """Run until so many actions of the clock, write a checkpoint, and stop in the action after it."""
    step, write, done = Clock.step, checkpoint.write, 0

    def counted(self: Clock) -> bool:
        nonlocal done
        done += 1
        if done > after:
            raise KeyboardInterrupt
        return step(self)

    def once(*arguments: Any, **options: Any) -> None:
        if done == after:
            write(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Clock, "step", counted)
        patch.setattr(checkpoint, "write", once)
        with pytest.raises(KeyboardInterrupt):
            simulate(chosen, out, checkpoint_seconds=0.0)


@pytest.mark.parametrize("name", ["baseline", "powersgd", "weightgrad-paper", "streaming", "auto"])
def test_a_run_goes_on_to_the_same_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = recipe(f"strategy={name}")
    whole = simulate(chosen, tmp_path / "whole")
    interrupted(monkeypatch, chosen, tmp_path / "part", after=40)
    assert (tmp_path / "part" / checkpoint.FILE).stat().st_size
    assert simulate(chosen, tmp_path / "part", checkpoint_seconds=600.0) == whole
    for file in ("events.jsonl", "model.safetensors"):
        assert (tmp_path / "part" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file
    assert not (tmp_path / "part" / checkpoint.FILE).exists()


def test_batch_norm_averages_and_faults_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = recipe(
        "model={name: resnet20}",
        "training.steps=3",
        "training.ema=0.9",
        "training.optimizer.momentum=0.9",
        "faults=[{at: 100 ms, kill: ohio, for: 200 ms}, {at: 50 ms, cut: [ohio, virginia], for: 1 s}]",
    )
    simulate(chosen, tmp_path / "whole")
    for after in (10, 20):  # stopped twice
        interrupted(monkeypatch, chosen, tmp_path / "part", after=after)
    simulate(chosen, tmp_path / "part", checkpoint_seconds=600.0)
    whole, part = ((tmp_path / place / "events.jsonl").read_bytes() for place in ("whole", "part"))
    assert part == whole
    assert b'"what":"kill"' in whole


def test_a_checkpoint_of_another_recipe_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, other = recipe("strategy=baseline"), recipe("strategy=baseline", "seed=1")
    interrupted(monkeypatch, chosen, tmp_path, after=20)
    path = tmp_path / checkpoint.FILE
    assert checkpoint.begun(path, mark=checkpoint.mark(chosen)) is not None
    assert checkpoint.begun(path, mark=checkpoint.mark(other)) is None
    assert checkpoint.begun(tmp_path / "none", mark="") is None
    summary = simulate(other, tmp_path, checkpoint_seconds=600.0)
    assert (summary["seed"], summary["status"]) == (1, "finished")
